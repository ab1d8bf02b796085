"""Python modules as child processes that end when this process ends, and the reasons why they ended.

A child process runs this file first: `python -m rlm_batch.flows.child_process PARENT MODULE ARGUMENTS`. PARENT is `-`
for a process that outlives this one.
"""

import gc
import os
import re
import runpy
import shutil
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Mapping
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

POLL_INTERVAL_SECONDS = 0.2  # seconds between two looks at the parent
END_GRACE_SECONDS = 0.5  # seconds from SIGTERM to SIGKILL
NO_PARENT = "-"
NEWER_DATABASE = "Can't locate revision identified by"  # what Alembic says of a revision that this Prefect lacks
LITTLE_SPACE = 64 * 1024 * 1024  # bytes; a new server's database takes 10 MB, and its log needs room too
# Python looks for garbage after 700 to 2,000 new objects by default. An import of Prefect makes 100,000 objects
# that stay. Checking them again and again takes a twentieth of the time of a first run.
GARBAGE_THRESHOLD = 10_000


def build_module_command(*words: object, parent: int | str | None = None) -> list[str]:
    """Return the command that runs a module in a process that ends within a second of its parent.

    The process imports nothing from the working directory (`-P`), where a file may have the name of any module.

    Args:
        words: The module and its arguments.
        parent: The id of the process that starts the command, by default this one; 0 means its actual parent,
            and NO_PARENT a process that does not end with another.
    """
    parent = os.getpid() if parent is None else parent
    return [sys.executable, "-P", "-m", __name__, str(parent), *map(str, words)]


def build_safe_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with settings that stop Python processes from importing from the working directory.

    Child processes, such as a worker's flow runs, inherit the settings. PYTHONPATH and PATH keep only absolute
    directories. An empty entry, as after a trailing colon, means the working directory, so it is removed.
    """
    safe = {**environment, "PYTHONSAFEPATH": "1"}
    for name in ("PYTHONPATH", "PATH"):
        if directories := keep_absolute(safe.pop(name, "")):
            safe[name] = directories
    return safe


def keep_absolute(directories: str) -> str:
    """Return a list such as PATH's without its relative entries."""
    return os.pathsep.join(path for path in directories.split(os.pathsep) if os.path.isabs(path))


def ignore_settings_files() -> list[str]:
    """Make Prefect ignore its settings files in the working directory, which a model may have written.

    Prefect reads `prefect.toml`, `.env` and `pyproject.toml` there. Their settings can run code through a logging
    configuration or another PREFECT_HOME. Prefect is imported only if such a file exists.

    Returns:
        The names of the ignored files.
    """
    names = [name for name in ("prefect.toml", ".env", "pyproject.toml") if _has_settings(Path(name))]
    if names:
        with chdir("/"):  # Prefect reads its settings first when it is imported.
            from prefect.settings import sources

        def read_nothing(*_arguments: object) -> dict[str, Any]:
            return {}

        # Prefect reads the files again when a program changes settings, and no setting tells it where to look.
        sources.TomlConfigSettingsSourceBase._read_files = read_nothing  # type: ignore[method-assign]
        sources.FilteredDotEnvSettingsSource._read_env_files = read_nothing  # type: ignore[method-assign]
    return names


def _has_settings(path: Path) -> bool:
    """Return whether a file contains settings of Prefect."""
    try:
        if path.name == "pyproject.toml":
            return "prefect" in tomllib.loads(path.read_text("utf-8")).get("tool", {})
        return b"prefect_" in path.read_bytes().lower() or path.name == "prefect.toml"
    except (OSError, ValueError):
        return False


def read_failure_reason(log: Path, offset: int) -> str:
    """Return the last error in a log after the byte `offset`, or the last line if there is no error."""
    lines = _read_lines(log, offset)
    return (_find_errors(lines) or lines or [_describe_silence(log)])[-1]


def read_last_error(log: Path, offset: int) -> str:
    """Return the last error in a log after the byte `offset`, or an empty text without errors."""
    return next(reversed(_find_errors(_read_lines(log, offset))), "")


def _read_lines(log: Path, offset: int) -> list[str]:
    with log.open("rb") as file:
        file.seek(offset)
        return [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]


def _describe_silence(log: Path) -> str:
    free = shutil.disk_usage(log.parent).free
    return "it said nothing" if free > LITTLE_SPACE else f"only {free:,} bytes are free in {log.parent}: make room"


def _find_errors(lines: list[str]) -> list[str]:
    errors = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Refused)\b", line)]
    return [_describe_newer_database() if NEWER_DATABASE in error else error for error in errors]


def _describe_newer_database() -> str:
    from importlib.metadata import version  # Every child process imports this module.

    return (
        f"a Prefect newer than {version('prefect')} has migrated its database: install that version, or use another "
        "PREFECT_HOME or database"
    )


def list_children(pid: int) -> list[int]:
    """Return the ids of a process's children, or an empty list on a system without /proc."""
    pids: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            pids += map(int, path.read_text().split())
    return pids


def describe_exit_status(status: int) -> str:
    """Return how a process ended, for people: `status 1`, `signal SIGKILL`."""
    return f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"


def _end_with_parent(parent: int) -> None:
    """Wait until the parent dies, then send SIGTERM to this process, and later SIGKILL to it and its children.

    The kernel gives a new parent to a process whose parent dies. Linux can signal the parent's death, but does so when
    the *thread* that started this process ends. macOS has no such signal. The children of a Prefect worker are its flow
    runs, and their sandboxes end with them.
    """
    while os.getppid() == parent:
        time.sleep(POLL_INTERVAL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_GRACE_SECONDS)
    for child in list_children(os.getpid()):
        with suppress(OSError):
            (os.killpg if os.getpgid(child) == child else os.kill)(child, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _main() -> None:
    # A shell starts background processes with SIGINT ignored. A Prefect worker that inherits this setting never ends.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.set_threshold(GARBAGE_THRESHOLD)
    ignore_settings_files()
    if sys.argv[1] != NO_PARENT:
        parent = int(sys.argv[1]) or os.getppid()
        threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
