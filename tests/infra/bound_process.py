"""Foreign programs that end with the process that started them, even if SIGKILL ended it.

This file is also the intermediate process: `bound_process.py PARENT SIGNAL USER GROUP COMMAND...`. It starts the
command, forwards signals to it, and exits with its status. Then it ends all processes of its group.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
POLL_INTERVAL = 0.2  # seconds between checks of the parent
START_SECONDS = 300.0  # for a server on a busy machine
GRACE = 0.5  # seconds from the signal to SIGKILL after the parent's end


def start_bound_process(
    command: Sequence[str | Path],
    *,
    end_signal: int = signal.SIGTERM,
    user: int | None = None,
    group: int | None = None,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Start the command in a new session; the command ends within a second after this process.

    Args:
        command: The program and its arguments.
        end_signal: The signal that the command gets first when this process ends. SIGKILL follows.
        user: The user id of the command; by default this process's own.
        group: The group id of the command; by default this process's own.
        options: Arguments of `subprocess.Popen`.

    Returns:
        The intermediate process. It forwards signals to the command, and SIGKILL to its group ends both.
    """
    ids = [os.getuid() if user is None else user, os.getgid() if group is None else group]
    between = [sys.executable, "-I", "-S", __file__, *map(str, (os.getpid(), int(end_signal), *ids))]
    return subprocess.Popen([*between, *map(str, command)], start_new_session=True, **options)


def start_server_process(
    command: Sequence[str | Path], log: Path, is_ready: Callable[[], bool], **options: Any
) -> subprocess.Popen[Any]:
    """Start a bound process whose output goes to a log, and wait until it is ready. Raises RuntimeError."""
    with log.open("ab") as file:
        process = start_bound_process(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, **options)
    until = time.monotonic() + START_SECONDS
    while not is_ready():
        if time.monotonic() > until or process.poll() is not None:
            raise RuntimeError(f"{command[0]} did not start: {log.read_text()[-3000:]}")
        time.sleep(0.05)
    return process


def main() -> int:
    """Run the command until it or the parent ends, and return its exit status."""
    parent, end_signal, user, group = map(int, sys.argv[1:5])
    is_other = user != os.getuid()
    child = subprocess.Popen(
        sys.argv[5:],
        user=user if is_other else None,
        group=group if is_other else None,
        extra_groups=[] if is_other else None,
    )

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_INTERVAL)
        child.send_signal(end_signal)
        time.sleep(GRACE)
        os.killpg(0, signal.SIGKILL)

    for number in HANDED_ON:
        signal.signal(number, lambda number, _: child.send_signal(number))
    threading.Thread(target=end_with_parent, daemon=True).start()
    status = child.wait()
    for number in HANDED_ON:
        signal.signal(number, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)  # remaining processes of the group
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    os._exit(main())
