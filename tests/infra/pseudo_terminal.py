"""A command in a pseudo-terminal, as in a person's terminal."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from types import TracebackType
from typing import Any, Self

from .waiting import HANG_SECONDS


class TerminalCommand:
    """A running command whose standard streams are a pseudo-terminal. It is killed at the end of the `with` block."""

    def __init__(self, command: list[str], *, rows: int = 24, columns: int = 100, **options: Any) -> None:
        self._ours, its = pty.openpty()
        self.output = ""
        self.resize(rows, columns)
        self.process = subprocess.Popen(
            # The tests may run under nohup, which ignores SIGHUP. The command must not inherit that setting.
            ["env", "--default-signal=HUP", *command],
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - it takes no lock
            **options,
        )
        os.close(its)

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the terminal, as a person who drags the window does."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_settings(self) -> list[Any]:
        """Return the settings of the terminal, which a command may have changed."""
        return termios.tcgetattr(self._ours)

    def close(self) -> None:
        """Close the terminal, as a person who closes the window does."""
        os.close(self._ours)
        self._ours = os.open(os.devnull, os.O_RDWR)

    def send(self, text: str) -> None:
        """Type the text."""
        os.write(self._ours, text.encode())

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the output since the last call matches the pattern, and return the match."""
        deadline = time.monotonic() + HANG_SECONDS
        while (match := re.search(pattern, self.output)) is None:
            if not self._read(deadline):
                raise AssertionError(f"no {pattern!r} in {self.output!r}")
        self.output = self.output[match.end() :]
        return match

    def wait(self) -> int:
        """Wait for the command's end, and return its exit status. `output` has the rest of the output."""
        deadline = time.monotonic() + HANG_SECONDS
        while self._read(deadline):
            pass
        return self.process.wait(30)

    def _read(self, deadline: float) -> bool:
        """Read more output; return False at the end of the command, or after the deadline."""
        if not select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # The command has ended.
            return False
        self.output += data.decode("utf-8", "replace")
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._ours)
