"""The driver's first steps, gone through for nothing: by the zygote, and by a process that waits to be a sandbox.

A fork shares its pages with the zygote until it writes to them, and hundreds are copied while a driver starts, at up to
3 us each. What a waiting process copies is not copied when somebody waits: the first answer comes a millisecond sooner.
What the zygote has gone through, Python has made ready for each fork: code in its specialised form (PEP 659, after
eight calls) and caches of attributes, which every fork would make anew in pages of its own.
"""

from __future__ import annotations

import os

from ...wire.frames import encode_frame
from ...wire.strict_json import dumps
from ..child.channel import CHANNEL_IN, CHANNEL_OUT
from ..processes import signal
from ..supervisor import Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..child.runner import CodeRunner
    from ..confinement import Confinement

ROUNDS = 16  # of the zygote: twice those eight calls, in some 20 ms
SETTINGS: dict[str, Any] = {
    "cwd": "/", "volume": None, "environment": {}, "path": [], "python_path": [], "executable": None, "temporary": [],
    "heartbeat": None, "silence": None, "lifetime": 60.0, "commit": [], "output_cap": 1000, "files": None,
    "confinement": {
        "limits": {"CORE": 0},
        "landlock": {"attributes": ["access"], "access": 15, "rules": [["/", 4]]},
        "seccomp": "060000000000ff7f" * 200,  # as long as a real one; what it allows is never asked
    },
}  # fmt: skip


def rehearse_driver(runner: CodeRunner, confinement: Confinement) -> None:
    """Goes through the driver's start and an execution that does nothing, in a process that stays what it is.

    It handles signals as before, except that SIGINT is ignored, and is told of no parent's end.
    """
    for place in (CHANNEL_IN, CHANNEL_OUT):
        null = os.open(os.devnull, os.O_RDWR)
        if null != place:
            os.dup2(null, place)
            os.close(null)
    for _ in range(ROUNDS):
        rehearse_start(runner)
        runner.enter_process()
        runner.rehearse()
    for place in (CHANNEL_IN, CHANNEL_OUT):
        os.close(place)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    confinement.outlive_parent()


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
