"""The command that commits the volume after an execution, before the execution's end is sent to the host."""

from __future__ import annotations

import os
import time

from ..wire.names import COMMIT_TIMEOUT_SECONDS
from ..wire.pipes import read_available
from ..wire.strict_json import dumps
from .processes import KILL_GRACE_SECONDS, send_signal, signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_COMPLAINT_CHARACTERS = 2000  # characters of the command's stderr


class Commit:
    """One run of the command, with the execution's end that waits for it."""

    def __init__(self, header: dict[str, Any], body: bytes) -> None:
        self.header, self.body = header, body
        self.stderr = -1  # our end of the command's standard error
        self.deadline = time.monotonic() + COMMIT_TIMEOUT_SECONDS
        self.is_late = False


class VolumeCommits:
    """A runner of the commit command. `running` holds its processes; `send` sends the end of a committed execution."""

    def __init__(self, command: list[str], send: Callable[[dict[str, Any], bytes], None]) -> None:
        self.running: dict[int, Commit] = {}
        self._command = command
        self._send = send

    def send_when_committed(self, header: dict[str, Any], body: bytes) -> None:
        """Send an execution's end after the commit command, or at once if there is no command."""
        if not self._command:
            self._send(header, body)
            return
        commit = Commit(header, body)
        try:
            self.running[self._start(commit)] = commit
        except OSError as error:
            self._finish(commit, f"{self._command[0]} could not be started: {error.strerror}")

    def _start(self, commit: Commit) -> int:
        """Start the command and return its process id. Raises OSError."""
        commit.stderr, stderr_writes = os.pipe()
        os.set_blocking(commit.stderr, False)
        actions = [(os.POSIX_SPAWN_DUP2, stderr_writes, 2)]
        try:
            return os.posix_spawnp(self._command[0], self._command, os.environ, file_actions=actions)
        finally:
            os.close(stderr_writes)

    def kill_late(self, now: float) -> None:
        """Kill the commands whose time is over; `now` is in monotonic seconds."""
        for pid, commit in self.running.items():
            if now >= commit.deadline:
                commit.is_late, commit.deadline = True, now + KILL_GRACE_SECONDS
                send_signal(pid, signal.SIGKILL)

    def on_end(self, pid: int, status: int) -> None:
        """Send the execution's end that waits for a command. The command's process has ended with this wait status."""
        commit = self.running.pop(pid)
        output = read_available(commit.stderr) or b""
        complaint = ""
        if status and commit.is_late:
            complaint = f"{self._command[0]} did not end within {COMMIT_TIMEOUT_SECONDS:.0f} s"
        elif status:
            complaint = output.decode("utf-8", "replace").strip()[-MAX_COMPLAINT_CHARACTERS:]
            complaint = complaint or f"it ended with status {status}"
        self._finish(commit, complaint)

    def _finish(self, commit: Commit, complaint: str) -> None:
        """Send an execution's end. A complaint replaces a successful status, but not the code's own error."""
        if commit.stderr >= 0:
            os.close(commit.stderr)
        header, body = commit.header, commit.body
        if complaint and header["status"] in ("submitted", "finished"):
            header["status"], body = "commit", dumps({"message": complaint}).encode("utf-8", "replace")
        self._send(header, body)
