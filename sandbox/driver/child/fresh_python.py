"""A Python of its own for code whose environment Python and the C library read when they start.

The confined child becomes it by `exec`. The supervisor never has these variables while it starts: they may name a
library or modules that other code has written, and would run them outside the child's walls.
"""

from __future__ import annotations

import fcntl
import marshal
import os
import sys

from ...wire.loading import LOAD
from ...wire.names import DRIVER_FILE_PREFIX
from ..confinement import Confinement
from ..processes import signal
from .channel import CHANNEL_IN, CHANNEL_OUT, FORK_REQUESTS
from .forking.fork_service import serve_forks
from .runner import CodeRunner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

driver_parts: Any = ()  # what loads the driver sets it to all that it loads
LOWEST_DESCRIPTOR = 10  # clear of where a child puts what is its own

PROGRAM = f"""# rlm-batch: a sandbox's code
import sys

sys.path[:] = [path for path in sys.path if path]
import marshal, os

fd, supervisor, is_forked_on = map(int, sys.argv[1:])
data = b""
while piece := os.pread(fd, 1 << 20, len(data)):  # other children share the file's position
    data += piece
os.close(fd)
parts, settings = marshal.loads(data)
{LOAD.format(prefix=DRIVER_FILE_PREFIX)}
load(parts).run_code(settings, supervisor, is_forked_on)
"""


def write_start_file(settings: dict[str, Any]) -> int:
    """A descriptor of what a child needs in order to start a Python of its own. Raises OSError."""
    names = [name for name, _ in driver_parts]
    parts = driver_parts[: names.index(__name__.partition(".")[2]) + 1]
    made = os.memfd_create("driver")
    data = memoryview(marshal.dumps((parts, settings)))
    while data:
        data = data[os.write(made, data) :]
    fd = fcntl.fcntl(made, fcntl.F_DUPFD_CLOEXEC, LOWEST_DESCRIPTOR)
    os.close(made)
    return fd


def start_fresh_python(supervisor: int, *, is_forked_on: bool) -> NoReturn:
    """Makes the calling process, a confined child, a new Python that waits for an execution. Raises OSError.

    It takes the start file from behind the descriptors of a child.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until there is something that handles it
    _set_inheritable(True, is_forked_on=is_forked_on)
    arguments = [FORK_REQUESTS + is_forked_on, supervisor, int(is_forked_on)]
    os.execve(sys.executable, [sys.executable, "-c", PROGRAM, *map(str, arguments)], os.environ)


def run_code(settings: dict[str, Any], supervisor: int, is_forked_on: int) -> None:
    """Waits for an execution, in a Python that has just started. With `is_forked_on` its forks do, once it is ready."""
    _set_inheritable(False, is_forked_on=bool(is_forked_on))
    confinement = Confinement.after_start(settings["confinement"])
    confinement.close_to_others()  # until it has an execution of its own
    runner = CodeRunner()
    runner.enter_process()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.path[:] = [path for path in sys.path if path not in settings["python_path"]]
    runner.apply_settings(settings)
    if is_forked_on:
        runner.prepare(confinement)
        serve_forks(runner, confinement, supervisor)
    runner.serve(confinement)


def _set_inheritable(is_inheritable: bool, *, is_forked_on: bool) -> None:
    """Has what the calling process executes keep a child's descriptors, or lose them."""
    for fd in (CHANNEL_IN, CHANNEL_OUT, *([FORK_REQUESTS] if is_forked_on else [])):
        os.set_inheritable(fd, is_inheritable)
