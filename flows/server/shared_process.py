"""The process of a shared server: it writes the state file by which commands find it, and ends when it is idle.

A command locks the state file while it uses the server, and the kernel releases the lock of a command that dies. So the
server ends only when it can lock the file for itself alone: during a long execution it gets no request, but is in use.
"""

import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import uvicorn
from prefect.settings import PREFECT_SERVER_API_AUTH_STRING

from ...sandbox.process_identity import read_own_identity

MAX_POLL_SECONDS = 5.0  # seconds between two looks at the state file and the last request
END_GRACE_SECONDS = 10.0  # seconds in which an idle server stores received data


class SharedServerProcess(uvicorn.Server):
    """A server with a state file, which it writes when it listens and removes when it ends.

    Args:
        config: The configuration of uvicorn.
        listener: The socket that it listens on.
        path: The state file.
        idle_seconds: Seconds without a request after which it ends, unless a command uses it.
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket, path: Path, idle_seconds: float) -> None:
        super().__init__(config)
        self._url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        self._path = path
        self._idle_seconds = idle_seconds
        self._handle = -1  # the open state file

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, listen, and then write the state file."""
        await super().startup(sockets)
        self._write_state()
        threading.Thread(target=self._end_when_idle, daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Remove the state file, and end the application."""
        if self._owns_path():
            self._path.unlink(missing_ok=True)
        await super().shutdown(sockets)

    def _write_state(self) -> None:
        """Write the state file at once as a whole. It is readable by this user alone, because it has the password."""
        state = {
            "url": self._url,
            "auth": PREFECT_SERVER_API_AUTH_STRING.value(),
            "process": read_own_identity(),
            "version": version("rlm-batch"),
            "started": time.time(),
        }
        partial = self._path.with_suffix(f".{os.getpid()}")
        self._handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.write(self._handle, json.dumps(state).encode())
            partial.replace(self._path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _owns_path(self) -> bool:
        """Return whether the state file is this server's. Another server may have replaced it."""
        try:
            return os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._handle))
        except OSError:
            return False

    def _end_when_idle(self) -> None:
        """End the process when nobody uses it, and it is idle, cannot be found, or is no longer installed."""
        requests, active_at = 0, time.monotonic()
        while True:
            time.sleep(min(MAX_POLL_SECONDS, self._idle_seconds / 4))
            if self.server_state.tasks or self.server_state.total_requests != requests:
                requests, active_at = self.server_state.total_requests, time.monotonic()
            is_idle = time.monotonic() - active_at > self._idle_seconds
            is_installed = Path(__file__).exists() and Path(sys.executable).exists()
            if (is_idle or not is_installed or not self._owns_path()) and self._lock_alone():
                break
        self.should_exit = True
        time.sleep(END_GRACE_SECONDS)
        with suppress(OSError):
            if self._owns_path():
                self._path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    def _lock_alone(self) -> bool:
        """Return whether no command uses the server. From then on, none can."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
