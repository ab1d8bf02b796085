"""The driver's first steps, gone through for nothing by a process that waits to be a sandbox.

A fork shares its pages with the zygote until it writes to them, and hundreds are copied while a driver starts, at up to
3 us each. What is copied here is not copied when somebody waits: the first answer comes a millisecond sooner.
"""

from __future__ import annotations

import os

from ...wire.frames import encode_frame
from ...wire.strict_json import dumps
from ..processes import signal
from ..supervisor import Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..child.runner import CodeRunner

SETTINGS: dict[str, Any] = {
    "cwd": "/", "volume": None, "environment": {}, "path": [], "python_path": [], "heartbeat": None, "silence": None,
    "lifetime": 60.0, "commit": [], "output_cap": 1000, "files": None,
    "confinement": {
        "limits": {"CORE": 0},
        "landlock": {"attributes": ["access"], "access": 15, "rules": [["/", 4]]},
        "seccomp": "060000000000ff7f" * 200,  # as long as a real one; what it allows is never asked
    },
}  # fmt: skip


def rehearse_start(runner: CodeRunner) -> None:
    """Starts a supervisor and stops it. The process is told of its parent's end since then, and adopts orphans."""
    reads, asks = os.pipe()
    answers, writes = os.pipe()
    supervisor = Supervisor(reads, writes, runner)
    try:
        start = encode_frame({"op": "start", "id": 0, "n": 0}, dumps(SETTINGS).encode())
        os.write(asks, start + encode_frame({"op": "stop", "id": 0, "n": 1}))
        supervisor.run()
    except OSError:
        pass  # a kernel without Landlock: as far as it goes
    finally:
        supervisor.close()
        for fd in (reads, asks, answers, writes):
            os.close(fd)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
