"""The process that makes a plan."""

from __future__ import annotations

import subprocess
import sys


def test_it_ends_with_the_process_that_started_it() -> None:
    code = "import time, planner.worker; planner.worker.end_with_starter(); print('waits', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        assert process.poll() is None
        process.stdin.close()  # as the system does when the process that holds it ends, also when it is killed
        assert process.wait(timeout=300)
