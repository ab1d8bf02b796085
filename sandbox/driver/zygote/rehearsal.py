"""A rehearsal of the driver's first steps, by the zygote and by a process that waits to become a sandbox.

A fork shares its pages with the zygote until it writes to them. A starting driver copies hundreds of pages, at up to
3 us each. A waiting process copies them before its request. Without the rehearsals a first answer takes 5.1 ms and not
3.2 ms.
The zygote's rehearsal makes Python specialise the code (PEP 659, after eight calls) and fill its attribute caches.
Otherwise every fork would do this work in its own pages.
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

ROUNDS = 16  # rehearsals in the zygote: twice the eight calls; they take some 20 ms
SETTINGS: dict[str, Any] = {
    "cwd": "/", "volume": None, "environment": {}, "path": [], "python_path": [], "executable": None, "temporary": [],
    "heartbeat": None, "silence": None, "lifetime": 60.0, "commit": [], "output_cap": 1000, "files": None,
    "confinement": {
        "limits": {"CORE": 0},
        "landlock": {"attributes": ["access"], "access": 15, "rules": [["/", 4]]},
        "seccomp": "060000000000ff7f" * 200,  # length of a real filter; its rules are never applied
    },
}  # fmt: skip


def rehearse_driver(runner: CodeRunner, confinement: Confinement) -> None:
    """Run the driver's start and an empty execution, without becoming a driver.

    Signal handling is unchanged afterwards, except that SIGINT is ignored and the parent's end sends no signal.
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
    """Start a supervisor and stop it. Afterwards the process gets SIGTERM at its parent's end, and adopts orphans."""
    reads, asks = os.pipe()
    answers, writes = os.pipe()
    supervisor = Supervisor(reads, writes, runner)
    try:
        start = encode_frame({"op": "start", "id": 0, "n": 0}, dumps(SETTINGS).encode())
        os.write(asks, start + encode_frame({"op": "stop", "id": 0, "n": 1}))
        supervisor.run()
    except OSError:
        pass  # A kernel without Landlock ends the rehearsal here.
    finally:
        supervisor.close()
        for fd in (reads, asks, answers, writes):
            os.close(fd)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
