"""Python modules as child processes that end when this process ends.

A child process runs this file first: `python -m rlm_batch.flows.child_process PARENT MODULE ARGUMENTS`. PARENT is `-`
for a process that outlives this one.
"""

import gc
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Collection, Mapping
from contextlib import chdir, suppress
from pathlib import Path

POLL_INTERVAL_SECONDS = 0.2  # seconds between two looks at the parent
END_GRACE_SECONDS = 0.5  # seconds from SIGTERM to SIGKILL
NO_PARENT = "-"
STOP_GRACE_SECONDS = 10.0  # seconds in which a server stores received data
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
    """Import Prefect without its settings files in the working directory, which a model may have written.

    Prefect reads `prefect.toml`, `.env` and `pyproject.toml` there. Their settings can run code through a logging
    configuration or another PREFECT_HOME. Prefect is imported only if such a file exists. It reads the files again if a
    program calls `temporary_settings`, so the commands change settings with `use_settings`.

    Returns:
        The names of the ignored files.
    """
    names = [name for name in ("prefect.toml", ".env", "pyproject.toml") if _has_settings(Path(name))]
    if names:
        with chdir("/"):
            import prefect.context  # noqa: F401
    return names


def _has_settings(path: Path) -> bool:
    """Return whether a file contains settings of Prefect."""
    try:
        if path.name == "pyproject.toml":
            return "prefect" in tomllib.loads(path.read_text("utf-8")).get("tool", {})
        return b"prefect_" in path.read_bytes().lower() or path.name == "prefect.toml"
    except (OSError, ValueError):
        return False


def start_module(
    *words: object,
    log: Path,
    environment: Mapping[str, str],
    parent: int | str | None = None,
    pass_fds: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start `python -m` with these words, in a session that Ctrl-C does not reach.

    The process ends with this process, unless `parent` is NO_PARENT. Its output is appended to `log`. It runs in the
    log's directory: Prefect and Alembic import from the working directory, where a model may have written files.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            build_module_command(*words, parent=parent),
            cwd=log.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=pass_fds,
        )


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process and its session, by SIGKILL after `STOP_GRACE_SECONDS`. An ended process is not an error."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
    if sys.argv[1] != NO_PARENT:
        parent = int(sys.argv[1]) or os.getppid()
        threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
