"""An empty Prefect database, made once per Prefect version because making one takes 12 s of CPU time."""

import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

BUILD = Path(__file__).parents[2] / "build"


def make_prefect_home(home: Path) -> Path:
    """Create the folder with an empty Prefect database, as the PREFECT_HOME of a new server, and return it."""
    home.mkdir(parents=True, exist_ok=True)
    template = BUILD / f"prefect-{version('prefect')}"
    template.mkdir(parents=True, exist_ok=True)
    with (template / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may arrive here at the same time
        if not (template / "done").exists():
            subprocess.run(
                [Path(sys.executable).with_name("prefect"), "server", "database", "upgrade", "--yes"],
                env={**os.environ, "PREFECT_HOME": str(template)},
                stdout=subprocess.DEVNULL,
                check=True,
                timeout=500,  # a guard against hanging
            )
            (template / "done").touch()
    shutil.copyfile(template / "prefect.db", home / "prefect.db")
    return home


def migrate_to_the_future(home: Path) -> None:
    """Give the database in `home` a revision that this Prefect does not have, as a newer Prefect does."""
    with closing(sqlite3.connect(home / "prefect.db")) as database:
        database.execute("UPDATE alembic_version SET version_num = 'f00000000000'")
        database.commit()
