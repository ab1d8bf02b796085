"""A sandbox's first child, forked before a request for the sandbox arrives, so that the request does not wait for it.

With it a first answer takes 3.2 ms, without it 5.2 ms (one core, bubblewrap, the interpreter's `start` and `execute`).

The zygote, the waiting driver and its first child each rehearse: they run the driver's first steps without effects.
Without the rehearsals a first answer takes 5.1 ms, for two reasons. A fork shares its memory pages with the zygote, and
copies a page when it first writes to it: a starting driver copies hundreds of pages, at up to 3 us each. A rehearsal
copies them before the request. And Python specialises code after eight calls (PEP 659): the zygote's rehearsals let it
do so once, in the pages that all forks share.
"""

from __future__ import annotations

import errno
import os

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
    """A child of a future supervisor. It rehearses, and waits for the settings and then for an execution.

    `handle` has its id and our ends of its pipes.
    """

    def __init__(self, runner: CodeRunner, waiting: int, user: tuple[int, int] | None, *, has_namespaces: bool) -> None:
        """Fork the child, which closes `waiting`, a descriptor of the caller. Raises OSError.

        In a sandbox that `has_namespaces`, the child enters a user namespace with the ids of `user`.
        """

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
        """Wait until the child has rehearsed. If it has ended, reap it and raise OSError."""
        pid, ours = self.handle
        channel = ours[1]
        try:
            os.set_blocking(channel, True)
            end_frame = os.read(channel, READ_BYTES)  # the end of the rehearsed execution
            if not end_frame:
                raise OSError(errno.ECHILD, "a sandbox's first child could not start")
            os.set_blocking(channel, False)
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
    """Rehearse, wait for the settings, and run executions. `enter` puts the process into its namespace."""
    Confinement({}).end_with_parent(supervisor)
    highest = leave_supervisor(ends, supervisor_fds)
    os.closerange(FORK_REQUESTS, highest + 1)
    enter()
    runner.enter_process()
    try:
        rehearsed = Confinement(SETTINGS["confinement"])
        rehearsed.build()
        rehearsed.close()
    except OSError:
        pass  # A kernel without Landlock ends the rehearsal here.
    runner.rehearse()
    settings = runner.wait_for_settings()
    enter_environment(settings)
    confinement = Confinement(settings["confinement"])
    confine(confinement, supervisor)
    confinement.close()
    runner.apply_settings(settings)
    runner.serve(confinement)


def rehearse_driver(runner: CodeRunner, confinement: Confinement) -> None:
    """Run the driver's start and an empty execution several times, without becoming a driver.

    Afterwards SIGINT is ignored, the parent's end sends no signal, and all other signals are handled as before.
    """
    for fd in (CHANNEL_IN, CHANNEL_OUT):
        null = os.open(os.devnull, os.O_RDWR)
        if null != fd:
            os.dup2(null, fd)
            os.close(null)
    for _ in range(ROUNDS):
        rehearse_start(runner)
        runner.enter_process()
        runner.rehearse()
    for fd in (CHANNEL_IN, CHANNEL_OUT):
        os.close(fd)
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
