"""A training in a process of its own, so that its memory peak can be measured. Commands and answers go through pipes.

Several workers can take turns step by step, so that their times are comparable.
"""

import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from examples.training import Report, Setting, Step, Training

ROOT = Path(__file__).resolve().parent.parent

EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
"""Environment in which the C library returns freed tensors to the system at once, so that they do not count in peaks."""


class WorkerFailed(Exception):
    """A worker ended early. `reason`: its last line of output, usually that of the exception."""

    def __init__(self, log: Path, reason: str = "") -> None:
        lines = log.read_text().strip().splitlines() or ["no message"]
        self.reason = reason or lines[-1]
        super().__init__("\n".join([*lines[-12:], *([reason] if reason else []), f"(all of it in {log})"]))


class Worker:
    """The parent's handle of a worker. Calls wait for its answer and raise WorkerFailed if it ended or hangs.

    `patience_seconds`: how long a call waits at most. `program`: the module that the process runs; it has to call `serve`.
    `limit_seconds`: how long the process may run; a call that waits then ends it and raises WorkerFailed. None for no limit.
    """

    def __init__(
        self,
        setting: Setting,
        log: Path,
        environment: Mapping[str, str] | None = None,
        patience_seconds: float = 1200.0,
        program: str = "examples.worker",
        limit_seconds: float | None = None,
    ) -> None:
        self._patience_seconds = patience_seconds
        self._limit_seconds = limit_seconds
        self._began = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", program],
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._ask(setting.model_dump_json())

    def step(self) -> Step:
        """Take one step."""
        return Step.model_validate(self._ask(json.dumps("step")))

    def steps(self, count: int) -> Step:
        """Take `count` steps, see `Training.steps`."""
        return Step.model_validate(self._ask(json.dumps({"steps": count})))

    @property
    def left_seconds(self) -> float:
        """Seconds until its limit."""
        return math.inf if self._limit_seconds is None else self._began + self._limit_seconds - time.monotonic()

    def busy_seconds(self) -> float:
        """Take one step and return how long the device computed in it, see `Training.busy_seconds`."""
        return float(self._ask(json.dumps("busy_seconds")))

    def reset_peak(self) -> None:
        """Reset the memory peak."""
        self._ask(json.dumps("reset_peak"))

    def wait_for_plan(self) -> None:
        """Wait until no plan is being made."""
        self._ask(json.dumps("wait_for_plan"))

    def finish(self) -> Report:
        """End the training and the process, and return the report."""
        report = Report.model_validate(self._ask(json.dumps("finish")))
        self.close()
        return report

    def close(self) -> None:
        """End the process, if it still runs, by closing its input."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended: the empty answer below says so
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        left = self.left_seconds
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, min(self._patience_seconds, left)))
        if not ready:
            self._process.kill()
            self.close()
            why = f"the worker gave no answer for {self._patience_seconds:g} s"
            if left < self._patience_seconds:
                why = f"the training was stopped at its limit of {self._limit_seconds:g} s"
            raise WorkerFailed(self._log, why)
        answer = self._process.stdout.readline()
        if not answer:
            self.close()
            raise WorkerFailed(self._log)
        return json.loads(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def serve(begin: Callable[[str], Training] = lambda line: Training(Setting.model_validate_json(line))) -> None:
    """Read a setting, then one command per line, and write the answers to the original standard output.

    `begin`: begins the training of a setting, given as JSON.
    """
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)  # output of libraries must not mix with the answers
        training = begin(sys.stdin.readline())
        answers.write("null\n")
        for line in sys.stdin:
            command = json.loads(line)
            if isinstance(command, dict):
                answers.write(training.steps(command["steps"]).model_dump_json() + "\n")
            elif command == "step":
                answers.write(training.step().model_dump_json() + "\n")
            elif command == "busy_seconds":
                answers.write(json.dumps(training.busy_seconds()) + "\n")
            elif command == "finish":
                answers.write(training.finish().model_dump_json() + "\n")
                return
            else:
                {"reset_peak": training.reset_peak, "wait_for_plan": training.wait_for_plan}[command]()
                answers.write("null\n")


if __name__ == "__main__":
    serve()
