"""Processes that serve while a test runs: a port for them, and what they said, where it fails."""

import secrets
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

END_SECONDS = 60.0  # for one that was asked to end: a worker sees to its flow runs
# Below those that the kernel gives away by itself (net.ipv4.ip_local_port_range, from 32768 on): one of those may be
# anybody's by the time that the process listens.
PORTS = range(20000, 32000)


def choose_port() -> int:
    """A port of loopback that is free, and that only who asks for it by number gets.

    Raises RuntimeError if none is found.
    """
    for _ in range(100):
        port = secrets.choice(PORTS)  # the tests of other processes may have seeded `random` alike
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port from {PORTS.start} to {PORTS.stop - 1}")


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
