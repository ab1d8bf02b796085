"""A private Postgres on loopback, from the programs that the machine has, for Prefect servers of the tests."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Self


def find_programs() -> Path | None:
    """The directory of `initdb` and `pg_ctl`, None where there is none.

    Debian has them beside PATH. Where RLM_BATCH_TESTS_PATH_ONLY is set, as .ci/hide-programs sets it, only PATH counts.
    """
    found = [Path(path).resolve() for path in [shutil.which("initdb")] if path]
    if not os.environ.get("RLM_BATCH_TESTS_PATH_ONLY"):
        found += sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)
    return next((path.parent for path in found if (path.parent / "pg_ctl").exists()), None)


class Postgres:
    """A context manager; `url` is what `PREFECT_API_DATABASE_CONNECTION_URL` is set to.

    It will not run as root: then it runs as `nobody`. Raises RuntimeError where there is no Postgres.
    """

    def __init__(self) -> None:
        found = find_programs()
        if found is None:
            raise RuntimeError("no initdb here: install Debian's package postgresql")
        self._programs = found
        self._user = pwd.getpwnam("nobody") if os.getuid() == 0 else pwd.getpwuid(os.getuid())
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self._port = listener.getsockname()[1]

    @property
    def url(self) -> str:
        return f"postgresql+asyncpg://tests@127.0.0.1:{self._port}/postgres"

    @property
    def pid(self) -> int:
        """The id of its process, while it runs; the server's every connection is a process below it."""
        return int((self._folder / "data" / "postmaster.pid").read_text().split()[0])

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        os.chown(self._folder, self._user.pw_uid, self._user.pw_gid)
        try:
            self._call("initdb", "--username=tests", "--auth=trust", "--encoding=UTF8", "--no-sync")
            options = f"-p {self._port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
            self._call("pg_ctl", "start", "-w", "-o", options, "-l", str(self._folder / "log"))
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._call("pg_ctl", "stop", "-w", "-m", "immediate")
        shutil.rmtree(self._folder, ignore_errors=True)

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
