"""Python modules as child processes, which end when their parent process ends.

A child process runs this file, which then runs the module: `python -m rlm_batch.flows.child_process PARENT MODULE
ARGUMENTS`. PARENT is the parent's id, or `-` for a child that may outlive it.
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
# New objects after which Python looks for garbage, instead of 700 to 2,000. An import of Prefect makes 100,000 objects
# that stay, and to check them again and again takes a twentieth of the time of a first run.
GARBAGE_THRESHOLD = 10_000


def build_module_command(*words: object, outlives: bool = False) -> list[str]:
    """Return the command that runs a module in a process that ends within a second of this one.

    The process imports nothing from the working directory (`-P`), where a file may have the name of any module.

    Args:
        words: The module and its arguments.
        outlives: Let the process continue when this process ends.
    """
    parent = NO_PARENT if outlives else str(os.getpid())
    return [sys.executable, "-P", "-m", __name__, parent, *map(str, words)]


def build_safe_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python and its child processes import nothing from the working directory.

    PYTHONPATH and PATH keep only absolute directories. An empty entry, as after a trailing colon, would mean the
    working directory.
    """
    safe = {**environment, "PYTHONSAFEPATH": "1"}
    for name in ("PYTHONPATH", "PATH"):
        directories = keep_absolute(safe.pop(name, ""))
        if directories:  # An empty variable would mean the working directory, too.
            safe[name] = directories
    return safe


def keep_absolute(directories: str) -> str:
    """Return a list such as PATH's without its relative entries."""
    return os.pathsep.join(path for path in directories.split(os.pathsep) if os.path.isabs(path))


def ignore_settings_files() -> list[str]:
    """Let Prefect ignore settings files in the working directory, which a model may have written.

    Prefect reads `prefect.toml`, `.env` and `pyproject.toml` there when it is imported. Their settings can run code
    through a logging configuration or another PREFECT_HOME. If there is such a file, Prefect is imported here, in
    another directory. It reads the files again if a program calls `temporary_settings`, so the commands change settings
    with `use_settings`.

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
    outlives: bool = False,
    pass_fds: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a module with its arguments, in a session that Ctrl-C does not reach.

    The working directory is that of the log. Prefect and Alembic import from the working directory, and in the one of
    this process a model may have written files.

    Args:
        words: The module and its arguments.
        log: The file to which the output is appended.
        environment: The environment of the process.
        outlives: Let the process continue when this process ends.
        pass_fds: Open files that the process inherits.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            build_module_command(*words, outlives=outlives),
            cwd=log.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=pass_fds,
        )


def end_process(process: subprocess.Popen[bytes], grace_seconds: float = STOP_GRACE_SECONDS) -> None:
    """End a process and its session, by SIGKILL after the seconds of grace. An ended process is not an error."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
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

    The children of a Prefect worker are its flow runs, and their sandboxes end with them.
    """
    # A process whose parent dies gets another parent. Linux can also send a signal then, but sends it already when the
    # thread ends that started this process. macOS has no such signal.
    while os.getppid() == parent:
        time.sleep(POLL_INTERVAL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_GRACE_SECONDS)
    for child in list_children(os.getpid()):
        with suppress(OSError):
            send = os.killpg if os.getpgid(child) == child else os.kill  # A flow run leads a process group.
            send(child, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _main() -> None:
    # A shell starts background processes with SIGINT ignored. A Prefect worker that inherits this setting never ends.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.set_threshold(GARBAGE_THRESHOLD)
    _, parent, *module_words = sys.argv
    if parent != NO_PARENT:
        threading.Thread(target=_end_with_parent, args=(int(parent),), daemon=True).start()
    sys.argv = module_words
    runpy.run_module(module_words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
