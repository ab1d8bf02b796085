"""The zygote: a process with the driver loaded, from which each new sandbox on this machine is forked.

It runs nothing but this program. The host is connected through a socket on descriptor 0, and the zygote ends when that
socket closes. A request is a JSON packet with four descriptors: the wire to read and to write, standard error, and the
status socket of the new sandbox. On the status socket the sandbox reports either success, with a handle on its first
process (pidfd), or the error. Later the zygote reports there how the sandbox ended.

When idle, the zygote forks a spare process, which waits for the next request. The spare process enters the namespaces
that all sandboxes have, and forks its first child (`child_ahead`). If a killed sandbox has no process namespace, the
zygote kills the processes that it left.
"""

from __future__ import annotations

import array
import errno
import fcntl
import gc
import os
import resource
import select
import socket
import sys
import time
from contextlib import suppress

from ...wire.strict_json import loads
from ..child.environment import hide_missing_site
from ..child.forking import import_common_modules
from ..child.runner import CodeRunner
from ..confinement import Confinement
from ..main import main as run_driver
from ..orphans import NEVER, OrphanKiller, kill_all_children
from ..processes import signal
from .child_ahead import ChildAhead, rehearse_driver, rehearse_start
from .namespaces import (
    enter_namespaces,
    enter_user_namespace,
    fill_python_mount,
    fork_into_pid_namespace,
    take_folder,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

MAX_REQUEST_BYTES = 64 * 1024  # the host refuses a longer request
DESCRIPTORS = 4  # descriptors in a request
# The zygote forks a spare process after this idle time, or when a sandbox ends. A fork right after a request would slow
# down the new sandbox. With a longer time, a host that opens sandboxes one after another would wait for each fork.
IDLE_MILLISECONDS = 3
WAKE_BYTES = 4096  # one byte for each signal
FAILED = 71  # EX_OSERR: the sandbox's walls could not be set up


def main(folders: str | None, user: tuple[int, int] | None, python_directory: dict[str, Any]) -> None:
    """Serve the host.

    Args:
        folders: Directory with the folders of all sandboxes; None without bubblewrap.
        user: User and group id of each sandbox in its user namespace; None if the host is root.
        python_directory: Arguments of `write_python_directory`, for the sandboxes' /python; unused without bubblewrap.
    """
    del os.environ["LD_BIND_NOW"]  # the loader has read it; the code's programs do not need it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # sandboxes do not inherit the signals that the host blocks
    # The host's socket is descriptor 0, which a sandbox uses for its wire.
    control = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 10))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    confinement = Confinement({})
    confinement.close_to_others()
    confinement.adopt_orphans()
    if folders is not None:
        fill_python_mount(python_directory)
    import_common_modules()
    hide_missing_site()
    compile("0", "<zygote>", "exec")  # the first compilation of a process makes a hundred types
    runner = CodeRunner()
    rehearse_driver(runner, confinement)
    gc.collect()
    gc.disable()
    gc.freeze()  # a collection touches every page that sandboxes would share
    _send_with_handle(control, b"ready")
    _Zygote(control, folders, user, confinement, runner).serve()


class Spare:
    """A process that will become a sandbox: its id, and the socket on which it waits for its request."""

    def __init__(self, pid: int, own_socket: socket.socket) -> None:
        self.pid = pid
        self.socket = own_socket

    def hand_over(self, data: bytes, fds: list[int]) -> bool:
        """Send a request to the process and close the socket. Return False if the process has ended. Raises OSError."""
        with self.socket:
            try:
                socket.send_fds(self.socket, [data], fds)
            except ConnectionError:
                return False
        return True


class _Zygote:
    """The server of one host, over the socket `control`. The other arguments are those of `main`."""

    def __init__(
        self,
        control: socket.socket,
        folders: str | None,
        user: tuple[int, int] | None,
        confinement: Confinement,
        runner: CodeRunner,
    ) -> None:
        self._control = control
        self._confinement = confinement
        self._folders = folders
        self._has_namespaces = folders is not None  # True with bubblewrap
        self._user = user
        self._runner = runner
        self._sandboxes: dict[int, socket.socket] = {}  # keys: ids of the sandboxes' first processes
        self._wake, self._wake_writes = os.pipe()
        self._spare: Spare | None = None
        self._is_spare_due = False
        self._orphans = OrphanKiller()  # cleans up after sandboxes without a process namespace
        self._own_namespace = -1
        if self._has_namespaces:
            self._own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        for fd in (self._wake, self._wake_writes):
            os.set_blocking(fd, False)

    def serve(self) -> None:
        signal.set_wakeup_fd(self._wake_writes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            events = poll.poll(self._find_wait())
            if time.monotonic() >= self._orphans.next_at:
                self._kill_orphans()
            if not events:
                self._fork_due_spare()
            for fd, _ in events:
                if fd == self._wake:
                    os.read(self._wake, WAKE_BYTES)
                    self._report_ends()
                    self._fork_due_spare()
                else:
                    self._open_sandbox()

    def _fork_due_spare(self) -> None:
        """Fork a spare process if there was a request since the last one was forked."""
        if self._is_spare_due:
            self._is_spare_due = False  # A spare process that ends is not replaced: the next one would fail too.
            with suppress(OSError):  # the next request for a sandbox reports the error if it persists
                self._spare = self._fork_spare()

    def _find_wait(self) -> float | None:
        """Return the milliseconds until something is due; None if nothing is."""
        wait = IDLE_MILLISECONDS if self._is_spare_due else None
        if self._orphans.next_at == NEVER:
            return wait
        orphans_wait = max(0.0, self._orphans.next_at - time.monotonic()) * 1000
        return orphans_wait if wait is None else min(wait, orphans_wait)

    def _end(self) -> NoReturn:
        """Kill all forked processes and exit, because the host has closed the socket."""
        if not self._has_namespaces:  # sandboxes with process namespaces end with this process
            kill_all_children()
        os._exit(0)

    def _open_sandbox(self) -> None:
        """Pass the host's next request to the spare process; fork one if there is none.

        Fork nothing else here: the code of a fork can read the variables of this call, such as the request.
        """
        data, fds, _, _ = socket.recv_fds(self._control, MAX_REQUEST_BYTES, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            self._end()
        if len(fds) != DESCRIPTORS:
            for fd in fds:  # The open file limit cut off the other descriptors. The host sees a closed wire.
                os.close(fd)
            return
        self._is_spare_due = True
        status = socket.socket(fileno=fds[3])
        self._report_ends()
        spare, self._spare = self._spare, None
        try:
            if spare is None or not spare.hand_over(data, fds):
                spare = self._fork_spare(fds)
                if not spare.hand_over(data, fds):
                    raise OSError(errno.ESRCH, "the new process was ended")
            self._sandboxes[spare.pid] = status
        except OSError as error:
            _send_words(status, f"failed {error.errno} {error}")
            status.close()
        for fd in fds[:3]:
            os.close(fd)

    def _fork_spare(self, request_fds: Sequence[int] = ()) -> Spare:
        """Fork a process that will become a sandbox. Raises OSError.

        If a request has arrived already, `request_fds` are its descriptors. The process gets copies of them with the
        request, and closes these, which its code must not find.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        zygote_pid = os.getpid()
        with theirs:
            try:
                pid = fork_into_pid_namespace(self._own_namespace) if self._has_namespaces else os.fork()
            except OSError:
                ours.close()
                raise
            if pid:
                return Spare(pid, ours)
            try:
                ours.close()
                for fd in request_fds:
                    os.close(fd)
                self._become_sandbox(theirs, zygote_pid, has_time=not request_fds)
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)  # goes to the process's own stderr
            finally:
                os._exit(FAILED)

    def _become_sandbox(self, waiting: socket.socket, zygote_pid: int, *, has_time: bool) -> None:
        """Detach from the zygote and the other sandboxes, wait for a request on `waiting`, and become the driver.

        If no request waits yet, the process `has_time` to rehearse and to fork its first child.
        """
        failure: OSError | None = None
        child: ChildAhead | None = None
        try:
            self._leave_zygote(zygote_pid)
            if has_time:
                child = self._rehearse(waiting)
        except OSError as error:
            failure = error
            waiting.shutdown(socket.SHUT_RD)  # a request already sent gets the error; later ones get a new process
        data, fds, _, _ = socket.recv_fds(waiting, MAX_REQUEST_BYTES, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        waiting.close()
        if not data or len(fds) != DESCRIPTORS:
            os._exit(0)  # the zygote ended, or this process reached its limit on open files
        status = socket.socket(fileno=fds.pop())
        try:
            if failure is not None:
                raise failure
            self._set_up(loads(data.decode()), fds, child)
            _send_with_handle(status, b"stands")
        except OSError as error:
            _send_words(status, f"failed {error.errno} {error}")
            return
        status.close()
        del data, fds, status
        # Wait for the host's first frame: before it, the host may still act on this process.
        select.select([0], [], [])
        run_driver(runner=self._runner, child=None if child is None else child.handle)

    def _leave_zygote(self, zygote_pid: int) -> None:
        """Separate the calling process, a new fork, from the zygote and the other sandboxes. Raises OSError.

        With bubblewrap the process enters new namespaces. Without, the kernel kills it when the zygote ends.
        """
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for inherited_socket in (self._control, *self._sandboxes.values()):
            inherited_socket.close()
        for fd in (self._wake, self._wake_writes):
            os.close(fd)
        os.setsid()
        if self._has_namespaces:
            os.close(self._own_namespace)
            enter_namespaces()
        else:
            self._confinement.end_with_parent(zygote_pid)

    def _rehearse(self, waiting: socket.socket) -> ChildAhead | None:
        """Fork the first child and rehearse, both at the same time. Return the child, or None if it could not start.

        The fork comes first: it makes all pages shared, so that a rehearsal before it would copy its pages twice.
        """
        child: ChildAhead | None = None
        try:
            child = ChildAhead(self._runner, waiting.fileno(), self._user, has_namespaces=self._has_namespaces)
        except OSError:
            pass  # the first execution forks it
        rehearse_start(self._runner)
        if child is not None:
            try:
                child.wait_until_rehearsed()
            except OSError:
                child = None
        return child

    def _set_up(self, request: dict[str, Any], wire: list[int], child: ChildAhead | None) -> None:
        """Set up what is specific to this sandbox. Raises OSError."""
        # The host finds the sandbox's processes by this mark: a limit that the kernel ignores, and forks inherit.
        mark = (request["mark"], request["mark"])
        resource.setrlimit(resource.RLIMIT_RSS, mark)
        if child is not None:
            resource.prlimit(child.handle[0], resource.RLIMIT_RSS, mark)
        if self._folders is not None:
            self._confinement.open_own_proc()  # closed again when the process becomes the supervisor
            take_folder(self._folders, request)
            if child is None:
                enter_user_namespace(self._user)
            else:
                child.join_user_namespace()
        os.chdir(request["cwd"])
        for number, fd in enumerate(wire):  # The driver reads and writes at 0 and 1.
            os.dup2(fd, number)
            os.close(fd)

    def _report_ends(self) -> None:
        """Report how sandboxes ended, and kill processes left by sandboxes without a process namespace."""
        while self._orphans.next_at == NEVER:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._on_end(pid, status)
        # There are orphans, which only their killer may reap.
        for known_pid in self._list_known():
            pid, status = os.waitpid(known_pid, os.WNOHANG)
            if pid:
                self._on_end(pid, status)

    def _on_end(self, pid: int, status: int) -> None:
        if self._spare is not None and pid == self._spare.pid:
            self._spare.socket.close()
            self._spare = None
        sandbox = self._sandboxes.pop(pid, None)
        if sandbox is not None:
            _send_words(sandbox, f"ended {os.waitstatus_to_exitcode(status)}")
            sandbox.close()
            # Otherwise the driver or the process namespace has ended all processes.
            if status and not self._has_namespaces:
                self._kill_orphans()

    def _list_known(self) -> list[int]:
        """Return the ids of all children that are no orphans."""
        pids = list(self._sandboxes)
        if self._spare is not None:
            pids.append(self._spare.pid)
        return pids

    def _kill_orphans(self) -> None:
        self._orphans.kill(self._list_known())


def _send_with_handle(to: socket.socket, words: bytes) -> None:
    """Send the words with a handle (pidfd) on this process."""
    process = os.pidfd_open(os.getpid())
    to.sendmsg([words], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [process]))])
    os.close(process)


def _send_words(status: socket.socket, words: str) -> None:
    try:
        status.send(words.encode("utf-8", "replace"), socket.MSG_DONTWAIT)
    except OSError:
        pass  # the host has closed the socket
