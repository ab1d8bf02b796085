"""Processes that serve while a test runs, and what they said, where it fails."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

END_SECONDS = 60.0  # for one that was asked to end: a worker sees to its flow runs


@contextmanager
def run_logged_process(command: Sequence[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """The process, which is asked to end and then ended. `options` are Popen's; the end of its log is printed."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        finally:
            process.kill()
            process.wait()
            print(log.read_text()[-5000:])  # pytest shows it where the test fails
