"""The process of a shared server: it writes the state file by which commands find it, and ends when it is idle.

A command locks the state file while it uses the server, and the kernel releases the lock of a command that dies. So the
server ends only when it can lock the file for itself alone: during a long execution it gets no request, but is in use.
"""

import json
import os
import socket
import time
from pathlib import Path

import uvicorn
from prefect.settings import PREFECT_SERVER_API_AUTH_STRING

from ...sandbox.file_lock import try_lock
from ...sandbox.process_identity import read_own_identity

TICKS_PER_CHECK = 10  # uvicorn has ten ticks a second


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
        self._requests, self._active_at = 0, 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, listen, and then write the state file."""
        await super().startup(sockets)
        self._write_state()
        self._active_at = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server ends: when it is idle and no command uses it."""
        is_over = await super().on_tick(counter)
        return is_over or (counter % TICKS_PER_CHECK == 0 and self._is_idle() and try_lock(self._handle))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Remove the state file, unless another server has replaced it, and end the application."""
        try:
            if os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._handle)):
                self._path.unlink()
        except OSError:
            pass  # The file is gone.
        await super().shutdown(sockets)

    def _write_state(self) -> None:
        """Write the state file at once as a whole. It is readable by this user alone, because it has the password."""
        state = {
            "url": self._url,
            "auth": PREFECT_SERVER_API_AUTH_STRING.value(),
            "process": read_own_identity(),
            "started": time.time(),
        }
        partial = self._path.with_suffix(f".{os.getpid()}")
        self._handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        os.write(self._handle, json.dumps(state).encode())
        partial.replace(self._path)

    def _is_idle(self) -> bool:
        if self.server_state.tasks or self.server_state.total_requests != self._requests:
            self._requests, self._active_at = self.server_state.total_requests, time.monotonic()
        return time.monotonic() - self._active_at > self._idle_seconds
