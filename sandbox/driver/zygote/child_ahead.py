"""A sandbox's first child, forked before a request for the sandbox arrives, so that the request does not wait for it.

With it a first answer takes 3.2 ms, without it 5.2 ms (one core, bubblewrap, the interpreter's `start` and `execute`).
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from ...wire.pipes import READ_BYTES
from ..child.channel import FORK_REQUESTS
from ..child.environment import enter_environment
from ..child_process import close_all, confine, fork_process, leave_supervisor
from ..confinement import Confinement
from .namespaces import enter_user_namespace, join_user_namespace
from .rehearsal import SETTINGS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..child.runner import CodeRunner


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
