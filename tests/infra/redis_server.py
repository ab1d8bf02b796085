"""A private Redis on loopback for the tests' Prefect servers, from the program of this machine."""

import shutil
import socket
import tempfile
from pathlib import Path
from typing import Self

from .bound_process import start_server_process
from .logged_process import choose_port


class RedisServer:
    """A context manager for a Redis server; `port` is where it listens.

    The server keeps its data in a file of its folder, like the one in compose.yaml.
    """

    def __init__(self) -> None:
        self.port = choose_port()

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self.start()
        return self

    def start(self) -> None:
        """Start the server; after `end`, it still has its earlier data."""
        where = ("--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder))
        command = ["redis-server", *where, "--appendonly", "yes"]
        self._process = start_server_process(command, self._folder / "log", self._answers)

    def end(self) -> None:
        """Terminate the server; its data stays in its folder."""
        self._process.terminate()
        self._process.wait(30)

    def __exit__(self, *_: object) -> None:
        self.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as asking:
                asking.sendall(b"PING\r\n")
                return asking.recv(16).startswith(b"+PONG")
        except OSError:
            return False
