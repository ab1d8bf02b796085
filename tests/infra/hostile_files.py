"""Directories with files that a process of the host might run by mistake."""

import importlib.metadata
import json
import sys
from pathlib import Path

# In a sandbox this code submits. In a host process it records its module's name and ends the process.
MODULE = """
try:
    SUBMIT(x=1)
except NameError:
    with open({mark!r}, "a") as file:
        file.write(__name__ + "\\n")
    raise SystemExit("a module of the working directory was imported: " + __name__)
"""
# With these settings the directory is a bare repository, and git runs a program instead of opening any address.
REPOSITORY = """
[core]
    bare = true
[protocol "ext"]
    allow = always
[url "ext::sh -c echo% git% >>{mark}% "]
    insteadOf = file://
"""
PROGRAMS = ("bwrap", "chmod", "chown", "cp", "git", "python3", "rm", "sh")


def fill_with_hostile_files(folder: Path) -> Path:
    """Write files into the folder that Python, Prefect, git and a shell would run there.

    They are modules named like those of the standard library and of every installed distribution, Prefect's settings, a
    bare repository, and programs.

    Returns:
        The file in which each file that ran on the host records its name. It is missing if none ran.
    """
    mark = folder.with_name(f"{folder.name}-ran")
    names = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions(), "sitecustomize", "usercustomize"}
    for name in names:
        if name.isidentifier():
            (folder / f"{name}.py").write_text(MODULE.format(mark=str(mark)))
    formatter = {"()": "subprocess.check_call", "args": ["sh", "-c", f"echo settings >>{mark}"]}
    handler = {"class": "logging.StreamHandler", "formatter": "own"}
    logging = {
        "version": 1,
        "formatters": {"own": formatter},
        "handlers": {"own": handler},
        "root": {"handlers": ["own"]},
    }
    (folder / "logging.yml").write_text(json.dumps(logging))  # JSON is YAML.
    (folder / "prefect.toml").write_text('[logging]\nconfig_path = "logging.yml"\n')
    (folder / "pyproject.toml").write_text('[tool.prefect.logging]\nconfig_path = "logging.yml"\n')
    (folder / ".env").write_text("PREFECT_LOGGING_SETTINGS_PATH=logging.yml\n")
    (folder / "objects").mkdir(exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / "config").write_text(REPOSITORY.format(mark=mark))
    for name in PROGRAMS:
        (folder / name).write_text(f"#!/bin/sh\necho {name} >>{mark}\n")
        (folder / name).chmod(0o755)
    return mark
