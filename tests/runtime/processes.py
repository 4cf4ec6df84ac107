"""Processes of tests that import PyTorch once: each is a fork of one that has imported it, and otherwise as fresh as any."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

FORKING = """
import json, os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores them, for example
signal.signal(signal.SIGINT, signal.default_int_handler)
import runtime.cpu, runtime.transfer, torch._inductor.compile_fx, teraio.backend  # what processes import here or later
torch._inductor.fx_passes.joint_graph.lazy_init(torch.device("cpu"))  # patterns for which the first graph is searched
while line := sys.stdin.readline():
    asked = json.loads(line)
    if "wait" in asked:
        print(os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1]), flush=True)
    elif pid := os.fork():
        print(pid, flush=True)
    else:
        break
else:
    sys.exit()
for number, path in enumerate(("/dev/null", *asked["outputs"])):
    os.dup2(os.open(path, os.O_WRONLY if number else os.O_RDONLY), number)
os.environ.update(asked["environment"])
sys.argv = ["-c", *asked["arguments"]]
exec(asked["code"])
"""


@dataclass
class Process:
    """A process that runs. stdout: what it prints, as it does."""

    pid: int
    stdout: TextIO
    errors: Path
    forking: Forking

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait until it has ended. Return its exit status; -number if a signal ended it."""
        self.forking.running.remove(self)
        status = self.forking.ask(wait=self.pid)
        self.stdout.close()
        return status


class Forking:
    """The process that all others are forks of. folder: for their pipes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[Process] = []
        self.count = 0
        command = [sys.executable, "-W", "ignore", "-c", FORKING]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **question: object) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def start(self, code: str, *arguments: object, **environment: str) -> Process:
        """Start a process that runs `code` with these arguments."""
        self.count += 1
        pipe, errors = self.folder / f"out.{self.count}", self.folder / f"errors.{self.count}"
        os.mkfifo(pipe)
        errors.touch()
        given = {"arguments": [str(each) for each in arguments], "environment": environment}
        pid = self.ask(code=code, outputs=[str(pipe), str(errors)], **given)
        self.running.append(Process(pid, open(pipe), errors, self))
        return self.running[-1]

    def run(self, code: str, *arguments: object, **environment: str) -> tuple[int, str, str]:
        """Run code until it ends. Return its exit status, what it printed, and its errors."""
        process = self.start(code, *arguments, **environment)
        printed = process.stdout.read()
        return process.wait(), printed, process.errors.read_text()

    def end_all(self) -> None:
        """Kill what still runs."""
        for process in list(self.running):
            process.signal(signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        self._process.communicate()
