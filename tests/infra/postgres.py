"""A private Postgres on loopback for the tests' Prefect servers, from the programs of this machine."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from .bound_process import start_server_process
from .logged_process import choose_port

END_SIGNAL = signal.SIGQUIT  # immediate shutdown despite open connections; it frees the shared memory


def find_programs() -> Path | None:
    """Return the directory of `initdb` and `postgres`, or None.

    Debian installs them outside PATH. If RLM_BATCH_TESTS_PATH_ONLY is set, as .ci/hide-programs does, only PATH counts.
    """
    programs = [Path(path).resolve() for path in [shutil.which("initdb")] if path]
    if not os.environ.get("RLM_BATCH_TESTS_PATH_ONLY"):
        programs += sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)
    return next((path.parent for path in programs if os.access(path.parent / "postgres", os.X_OK)), None)


class Postgres:
    """A context manager for a Postgres server; `url` is a value for `PREFECT_API_DATABASE_CONNECTION_URL`.

    Postgres does not run as root, so root's tests run it as `nobody`. Raises RuntimeError if Postgres is missing.
    """

    def __init__(self) -> None:
        programs = find_programs()
        if programs is None:
            raise RuntimeError("no initdb here: install Debian's package postgresql")
        self._programs = programs
        self._process: subprocess.Popen[bytes] | None = None
        self._user = pwd.getpwnam("nobody") if os.getuid() == 0 else pwd.getpwuid(os.getuid())
        self._port = choose_port()

    @property
    def url(self) -> str:
        return f"postgresql+asyncpg://tests@127.0.0.1:{self._port}/postgres"

    @property
    def pid(self) -> int:
        """Return the process id of the running server, whose child processes serve the connections."""
        return int((self._folder / "data" / "postmaster.pid").read_text().split()[0])

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        os.chown(self._folder, self._user.pw_uid, self._user.pw_gid)
        try:
            self._call("initdb", "--username=tests", "--auth=trust", "--encoding=UTF8", "--no-sync")
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.send_signal(END_SIGNAL)
            self._process.wait(30)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        command = [self._programs / "postgres", "-D", self._folder / "data", "-p", str(self._port), *options]
        who = {"user": self._user.pw_uid, "group": self._user.pw_gid}
        self._process = start_server_process(
            command, self._folder / "log", self._is_ready, end_signal=END_SIGNAL, cwd="/", **who
        )

    def _is_ready(self) -> bool:
        """Return whether the server accepts connections; the last line of its pid file says so."""
        try:
            return (self._folder / "data" / "postmaster.pid").read_text().split()[-1] == "ready"
        except (OSError, IndexError):
            return False

    def _call(self, program: str, *arguments: str) -> None:
        root = os.getuid() == 0
        subprocess.run(
            [self._programs / program, "-D", self._folder / "data", *arguments],
            check=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            user=self._user.pw_uid if root else None,
            group=self._user.pw_gid if root else None,
            extra_groups=[] if root else None,
        )
