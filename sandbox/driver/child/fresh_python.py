"""A new Python for code whose environment has variables that Python or the C library reads when it starts.

The confined child becomes this Python by `exec`. The supervisor must not start with these variables: they may name a
library or module that other code wrote, which would then run outside the child's walls.
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
from .forking import serve_code
from .runner import CodeRunner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

driver_parts: Any = ()  # the loader sets it to the names and code of all modules
LOWEST_DESCRIPTOR = 10  # above a child's fixed descriptors

PROGRAM = f"""# rlm-batch: a sandbox's code
import sys

sys.path[:] = [path for path in sys.path if path]
import marshal, os

fd, supervisor, has_forks = map(int, sys.argv[1:])
data = b""
while piece := os.pread(fd, 1 << 20, len(data)):  # other children share the file's position
    data += piece
os.close(fd)
parts, settings = marshal.loads(data)
{LOAD.format(prefix=DRIVER_FILE_PREFIX)}
load(parts).run_code(settings, supervisor, has_forks)
"""


def write_start_file(settings: dict[str, Any]) -> int:
    """Return the descriptor of a file with all that a child needs to start a new Python. Raises OSError."""
    module_names = [name for name, _code in driver_parts]
    own_name = __name__.partition(".")[2]
    needed_parts = driver_parts[: module_names.index(own_name) + 1]
    fd = os.memfd_create("driver")
    with open(fd, "wb") as file:
        file.write(marshal.dumps((needed_parts, settings)))
        file.flush()
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOWEST_DESCRIPTOR)


def start_fresh_python(supervisor: int, *, has_forks: bool) -> NoReturn:
    """Replace the calling confined child with a new Python that waits for an execution. Raises OSError."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the new Python has no handler yet
    _set_inheritable(True, has_forks=has_forks)
    arguments = [FORK_REQUESTS + has_forks, supervisor, int(has_forks)]
    os.execve(sys.executable, [sys.executable, "-c", PROGRAM, *map(str, arguments)], os.environ)


def run_code(settings: dict[str, Any], supervisor: int, has_forks: int) -> None:
    """Run executions in a newly started Python; with `has_forks`, run `prepare` and then each execution in a fork."""
    _set_inheritable(False, has_forks=bool(has_forks))
    confinement = Confinement({})  # this process is confined already
    confinement.has_domain = bool(settings["confinement"].get("landlock"))
    confinement.close_to_others()  # an execution opens it again
    runner = CodeRunner()
    runner.enter_process()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.path[:] = [path for path in sys.path if path not in settings["python_path"]]
    runner.apply_settings(settings)
    serve_code(runner, confinement, supervisor, has_forks=bool(has_forks))


def _set_inheritable(is_inheritable: bool, *, has_forks: bool) -> None:
    """Set whether the child's descriptors survive an `exec` of the calling process."""
    os.set_inheritable(CHANNEL_IN, is_inheritable)
    os.set_inheritable(CHANNEL_OUT, is_inheritable)
    if has_forks:
        os.set_inheritable(FORK_REQUESTS, is_inheritable)
