"""The worker's file in tests: what runs of deployments may do, for this process or for a worker."""

import json
from pathlib import Path
from typing import Any

# Python runs this module at its start. With it, the home of the process's user in the password database is HOME.
SITE = """
import pwd

find_user = pwd.getpwuid


def find_user_at_home(uid):
    user = list(find_user(uid))
    user[5] = {home!r}
    return pwd.struct_passwd(user)


pwd.getpwuid = find_user_at_home
"""


def write_policy(file: Path, **allowed: Any) -> None:
    """Write a worker's file that allows this."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.parent.chmod(0o755)
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in allowed.items()))
    file.chmod(0o644)


def move_home(folder: Path, **allowed: Any) -> dict[str, str]:
    """Return the environment of a worker whose user has the folder as home, with a worker's file that allows this."""
    folder.mkdir(exist_ok=True)
    write_policy(folder / ".config" / "rlm-batch" / "worker.toml", **allowed)
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE.format(home=str(folder)))
    return {"PYTHONPATH": str(site)}
