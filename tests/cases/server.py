"""Runs command lines of gradaudit, each in a fresh fork of a process that has imported torch already.

An import of torch takes longer than most cases train. Asked through its standard input, one JSON object a line: the
arguments, the working directory, and the files that standard output and error go to. Answers with the exit status.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any


class Server:
    """The process, opened once and closed at the end."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `gradaudit ARGUMENTS` in a folder."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        out, err = folder / "stdout.txt", folder / "stderr.txt"
        job = {"arguments": arguments, "folder": str(folder), "stdout": str(out), "stderr": str(err)}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        status = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(arguments, status, out.read_text(), err.read_text())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def _serve() -> None:
    import torch._dynamo  # noqa: F401  # the slow part, imported when an optimizer is made

    import gradaudit.capture.recording

    # importing it opens nothing; a fork takes over no thread
    assert not gradaudit.capture.recording._attached
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(job)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(job: dict[str, Any]) -> None:
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(job["folder"])
    status = 0
    try:
        from gradaudit.cli import main

        sys.argv = ["gradaudit", *job["arguments"]]
        main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve()
