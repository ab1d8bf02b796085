"""Directories with a file for every module that a process might import by mistake."""

import importlib.metadata
import sys
from pathlib import Path

# As code in a sandbox it submits; imported by a process of the host it leaves its name, and ends that process.
MODULE = """
try:
    SUBMIT(x=1)
except NameError:
    with open({mark!r}, "a") as file:
        file.write(__name__ + "\\n")
    raise SystemExit("a module of the working directory was imported: " + __name__)
"""


def fill_with_modules(folder: Path) -> Path:
    """Write a module for each name of the standard library and of every installed distribution into the folder.

    Returns:
        The file that has the names of those that were imported on the host. It exists only where there was one.
    """
    mark = folder.with_name(f"{folder.name}-imported")
    names = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions(), "sitecustomize", "usercustomize"}
    for name in names:
        if name.isidentifier():
            (folder / f"{name}.py").write_text(MODULE.format(mark=str(mark)))
    return mark
