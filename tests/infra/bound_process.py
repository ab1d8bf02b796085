"""Programs that are not ours as processes that end with whoever started them, were it by SIGKILL.

This file is also what runs between the two: `bound_process.py PARENT SIGNAL USER GROUP COMMAND...`. It starts the
command, hands signals on to it, and ends as it does; nothing of its process group is left then.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
POLL_INTERVAL = 0.2  # seconds between two looks at who the parent is
GRACE = 0.5  # seconds from the signal to SIGKILL, once the parent is gone


def start_bound_process(
    command: Sequence[str | Path],
    *,
    end_signal: int = signal.SIGTERM,
    user: int | None = None,
    group: int | None = None,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Starts the command in a session of its own; it is gone within a second of this process.

    It is told by `end_signal` first. `options` are Popen's, which gives the process in between: a signal to that
    reaches the command, and SIGKILL to its group ends both.
    """
    ids = [os.getuid() if user is None else user, os.getgid() if group is None else group]
    between = [sys.executable, "-I", "-S", __file__, *map(str, (os.getpid(), int(end_signal), *ids))]
    return subprocess.Popen([*between, *map(str, command)], start_new_session=True, **options)


def main() -> int:
    """Runs the command to its end, or the parent's."""
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
    os.killpg(0, signal.SIGTERM)  # what the command has left in its group
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    os._exit(main())
