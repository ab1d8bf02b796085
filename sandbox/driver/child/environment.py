"""The environment of code: working directory, variables, modules and streams."""

from __future__ import annotations

import os
import sys
import time

from ...wire.python_directory import write_python_directory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MODULES = sys.modules  # the import system keeps using this dict even if code replaces `sys.modules`
# Variables that Python, the loader or the C library reads once, at a program's start. Time zones can be set later.
START_VARIABLES = ("LANG", "LANGUAGE", "LOCPATH")
START_PREFIXES = ("PYTHON", "LC_", "LD_", "MALLOC_", "GLIBC_")


def needs_new_start(environment: dict[str, str]) -> bool:
    """Return whether one of these variables takes effect only in a newly started Python."""
    for name, value in environment.items():
        is_read_at_start = name in START_VARIABLES or name.startswith(START_PREFIXES)
        if is_read_at_start and os.environ.get(name) != value:
            return True
    return False


def enter_environment(settings: dict[str, Any]) -> None:
    """Apply the settings to the calling process and its future forks; make ``cwd`` absolute. Raises OSError."""
    settings["cwd"] = os.path.abspath(settings["cwd"])
    os.chdir(settings["cwd"])
    os.environ.update(settings["environment"])
    if "TZ" in settings["environment"]:
        time.tzset()
    sys.path += settings["path"]
    if settings["executable"] is not None:
        _use_python(settings["executable"], settings["python_path"])


def _use_python(executable: str, python_path: list[str]) -> None:
    """Make this executable the code's Python (`sys.executable`, PATH), so that processes of the code start it.

    A local sandbox has the executable. Elsewhere it is missing: create its directory for the machine's own Python.
    """
    prefix = os.path.dirname(os.path.dirname(executable))
    if not os.path.lexists(executable):
        base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        sites = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
        try:
            write_python_directory(prefix, base, first=python_path, sites=sites)
        except OSError:
            return  # full or read-only file system: use the machine's Python without the modules
        # Scripts whose first line names the machine's Python do not use the directory, but find the modules so.
        paths = [*python_path, os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    sys.executable, sys.prefix, sys.exec_prefix = executable, prefix, prefix
    sys.orig_argv = [executable, *sys.argv]
    os.environ["VIRTUAL_ENV"] = prefix
    os.environ["PATH"] = f"{prefix}/bin:{os.environ.get('PATH', os.defpath)}"
    hide_missing_site()


def hide_missing_site() -> None:
    """Clear the flag that this Python was started without `site`, as in a local sandbox.

    `multiprocessing` and joblib pass the flag to the processes that they start, which then would find no packages.
    """
    if sys.flags.no_site:
        import ctypes

        set_item = ctypes.pythonapi.PyStructSequence_SetItem
        set_item.argtypes, set_item.restype = [ctypes.py_object, ctypes.c_ssize_t, ctypes.py_object], None
        set_item(sys.flags, type(sys.flags).__match_args__.index("no_site"), 0)


def open_streams() -> dict[str, Any]:
    """Replace Python's streams by the code's: UTF-8 unless the environment chooses, and each line written at once."""
    streams: dict[str, Any] = {}
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        is_input = name == "stdin"
        encoding, errors = "utf-8", "replace" if is_input else "backslashreplace"
        if "PYTHONIOENCODING" in os.environ:
            present: Any = getattr(sys, name)
            encoding, errors = present.encoding, present.errors
        if is_input:
            stream: Any = open(fd, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
        elif os.environ.get("PYTHONUNBUFFERED"):
            import io

            raw: Any = io.FileIO(fd, "w", closefd=False)
            stream = io.TextIOWrapper(raw, encoding, errors, write_through=True)
        else:
            stream = open(fd, "w", 1, encoding, errors, closefd=False)  # noqa: SIM115
        streams[name] = stream
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    return streams


class ImportWatcher:
    """A finder that changes some modules after their import: `actions` maps module names to functions."""

    def __init__(self) -> None:
        self.actions: dict[str, Callable[[Any], None]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a module that has an action; return None for all others."""
        action = self.actions.get(name)
        if action is None:
            return None
        spec: Any = None
        for finder in sys.meta_path:
            if finder is not self and spec is None:
                spec = finder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: Any) -> None:
                execute(module)
                action(module)

            spec.loader.exec_module = execute_and_change
        return spec
