"""A module of Prefect's or uvicorn's as a process of ours, which ends when we do."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from ..flows.child_process import build_module_command
from ..flows.prefect_server import server_environment

END_GRACE_SECONDS = 10.0  # seconds to end by itself: a server writes what it has taken in


class PrefectProcess:
    """A command that runs from `launch` to `end`, with `home` as its PREFECT_HOME; it writes its log to `log`."""

    def __init__(self, home: Path, log: str) -> None:
        self.log = home / log
        self._home = home
        self._process: subprocess.Popen[bytes] | None = None
        self._log_offset = 0  # of this start's part of the log

    @property
    def pid(self) -> int | None:
        """The id of its process, while it runs."""
        return None if self._process is None else self._process.pid

    def poll_exit_status(self) -> int | None:
        """The exit status if it has ended by itself, negative for a signal; None while it runs and after `end`."""
        return None if self._process is None else self._process.poll()

    def _environment(self) -> dict[str, str]:
        """What it is launched with: this process's own, and the settings that we ship."""
        environment = server_environment()
        # The command line sets it for itself, and the log is where a person looks for what went wrong.
        environment.pop("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", None)
        environment["PREFECT_HOME"] = str(self._home)
        return environment

    def _launch(self, *words: str, environment: dict[str, str]) -> None:
        """Starts `python -m` with these words, in a session of its own: Ctrl-C ends the flow runs first."""
        with self.log.open("ab") as output:
            self._log_offset = output.tell()
            self._process = subprocess.Popen(
                build_module_command(*words),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Ends a launched process with all of its session, by SIGKILL after a grace; one that has ended is no error."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
