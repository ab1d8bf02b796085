"""A database of Prefect's that is made once for each version of it: making one takes 12 s of a processor."""

import fcntl
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

BUILD = Path(__file__).parents[2] / "build"


def make_prefect_home(home: Path) -> Path:
    """The folder, with an empty database of Prefect's in it, as the PREFECT_HOME of a server that is to start."""
    home.mkdir(parents=True, exist_ok=True)
    template = BUILD / f"prefect-{version('prefect')}"
    template.mkdir(parents=True, exist_ok=True)
    with (template / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of one run of tests come here at the same time
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
