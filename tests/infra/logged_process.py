"""Server processes for the duration of a test: a free port, and their log if the test fails."""

import secrets
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

END_SECONDS = 60.0  # seconds for a process to end after SIGTERM: a worker ends its flow runs first
# These ports are below those that the kernel assigns by itself (net.ipv4.ip_local_port_range, from 32768). Another
# process could have such a port before ours listens.
PORTS = range(20000, 32000)


def choose_port() -> int:
    """Return a free loopback port that the kernel does not assign by itself.

    Raises RuntimeError if none is found.
    """
    for _ in range(100):
        port = secrets.choice(PORTS)  # not `random`, which other test processes may have seeded with the same value
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port from {PORTS.start} to {PORTS.stop - 1}")


@contextmanager
def run_logged_process(command: Sequence[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Yield the process, and terminate it afterwards. `options` are Popen's; the end of its log is printed."""
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
            print(log.read_text()[-5000:])  # pytest shows it if the test fails
