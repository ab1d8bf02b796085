"""A sandbox's first child, forked before a request for the sandbox arrives, so that the request does not wait for it.

With it a first answer takes 3.2 ms, without it 5.2 ms (one core, bubblewrap, the interpreter's `start` and `execute`).

The zygote and both waiting processes rehearse the driver's first steps. A fork shares its pages with the zygote until
it writes to them, and a starting driver copies hundreds of pages, at up to 3 us each. A waiting process copies them
before its request: without the rehearsals a first answer takes 5.1 ms. The zygote's rehearsal makes Python specialise
the code (PEP 659, after eight calls) and fill its attribute caches. Otherwise every fork would do this work in its
own pages.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from ...wire.frames import encode_frame
from ...wire.pipes import READ_BYTES
from ...wire.strict_json import dumps
from ..child.channel import CHANNEL_IN, CHANNEL_OUT, FORK_REQUESTS
from ..child.environment import enter_environment
from ..child_process import close_all, confine, fork_process, leave_supervisor
from ..confinement import Confinement
from ..processes import signal
from ..supervisor import Supervisor
from .namespaces import enter_user_namespace, join_user_namespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..child.runner import CodeRunner


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


class ChildAhead:
    """A child of a future supervisor; it rehearses, and waits for the settings and then for an execution.

    `handle` is its id and our ends of its pipes. The child closes `waiting`, a descriptor of the caller. With
    `has_namespaces` the child enters a user namespace, with the ids of `user`. If the child cannot start, this and
    `wait_until_rehearsed` raise OSError and leave no process; the sandbox works without the child.
    """

    def __init__(self, runner: CodeRunner, waiting: int, user: tuple[int, int] | None, *, has_namespaces: bool) -> None:
        def enter() -> None:
            if has_namespaces:
                Confinement({}).open_own_proc()  # closed again when the child is confined
                enter_user_namespace(user)

        self.handle = fork_process(
            lambda supervisor, ends, ours: _run_child(runner, supervisor, ends, [waiting, *ours], enter)
        )
        self._namespace = -1
        self._has_own_namespace = has_namespaces and user is not None

    def wait_until_rehearsed(self) -> None:
        """Wait until the child has rehearsed. Raises OSError if it has ended."""
        pid, ours = self.handle
        try:
            os.set_blocking(ours[1], True)
            if not os.read(ours[1], READ_BYTES):  # The child ended during its rehearsal.
                raise OSError(errno.ECHILD, "a sandbox's first child could not start")
            os.set_blocking(ours[1], False)
            if self._has_own_namespace:
                self._namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            close_all(ours)  # the child ends when its pipes close
            os.waitpid(pid, 0)
            raise

    def join_user_namespace(self) -> None:
        """Put the calling process into the child's user namespace and drop its capabilities. Raises OSError."""
        if self._namespace < 0:
            enter_user_namespace(None)
        else:
            join_user_namespace(self._namespace)
            os.close(self._namespace)


def _run_child(
    runner: CodeRunner, supervisor: int, ends: list[int], supervisor_fds: list[int], enter: Callable[[], None]
) -> None:
    Confinement({}).end_with_parent(supervisor)
    highest = leave_supervisor(ends, supervisor_fds)
    os.closerange(FORK_REQUESTS, highest + 1)
    enter()
    runner.enter_process()
    with suppress(OSError):  # A kernel without Landlock ends the rehearsal here.
        rehearsed = Confinement(SETTINGS["confinement"])
        rehearsed.build()
        rehearsed.close()
    runner.rehearse()
    settings = runner.wait_for_settings()
    enter_environment(settings)
    confinement = Confinement(settings["confinement"])
    confine(confinement, supervisor)
    confinement.close()
    runner.apply_settings(settings)
    runner.serve(confinement)


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
    confinement.signal_at_parent_end(0)


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
