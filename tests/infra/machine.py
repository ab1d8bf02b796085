"""A command that runs as if on a separate machine, in Linux namespaces with a relay; it can be killed as a whole.

    python tests/infra/machine.py < REQUEST      a line of JSON, the fields of `Request`

The program answers with a line of JSON. `pid` is the id of the root process, which all other processes of the command
depend on. `refused` is the reason why there are no namespaces, or null. Then a `kill` on standard input, or the end of
the input, kills everything with SIGKILL. The program ends after all of these processes, with the command's status.

The command runs in user, process, mount, network, IPC and host name namespaces. It reaches only the requested loopback
ports, under the same numbers as outside. The root process creates a listening socket for each port and sends it to this
process, which copies the bytes between that socket and the port outside. If the kernel provides no namespaces, the
command shares this machine, and its processes are found by their parents.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import functools
import json
import os
import signal
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NEW_NAMESPACES = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 1 << 18
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MAX_UNSENT_BYTES = 1 << 20  # unsent bytes of one side, above which reading from the other side pauses


@dataclass
class Request:
    """A command to run; `ports` are the loopback ports outside that it may reach."""

    command: list[str]
    environment: dict[str, str]
    cwd: str
    log: str
    ports: list[int] = field(default_factory=list)
    name: str = "machine"  # host name of the machine
    apart: bool = True


# --------------------------------------------------------------------------------------------------------------- inside


def call_libc(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises OSError, whose message contains the function's name."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def enter_namespaces(link: socket.socket) -> None:
    """Leave this machine's namespaces but keep its files; the child that is forked next is process 1."""
    call_libc("unshare", NEW_NAMESPACES)
    link.send(b"map")
    if link.recv(16) != b"mapped":
        raise OSError("the user namespace could not be mapped")


def set_up_namespaces(request: Request) -> list[socket.socket]:
    """Set up /proc, loopback and the host name as process 1, and return the listening sockets of the ports."""
    call_libc("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    call_libc("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    socket.sethostname(request.name)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        flags = struct.unpack("16sH14x", fcntl.ioctl(probe, SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0)))[1]
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))
    listeners = []
    for port in request.ports:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(512)
        listeners.append(listener)
    return listeners


def run_command(request: Request) -> int:
    """Run the command as the root process, which adopts orphans, and return the command's status."""
    child = 0
    call_libc("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: child and os.kill(child, signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setsid()
        os.chdir(request.cwd)
        log = os.open(request.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for number in (1, 2):
            os.dup2(log, number)
        os.execve(request.command[0], request.command, request.environment)
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def run_inside(request: Request, link: socket.socket) -> None:
    """Enter the namespaces as the intermediate process, fork process 1, and exit as it does."""
    end_with_parent(signal.SIGKILL if request.apart else signal.SIGHUP)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    try:
        if request.apart:
            enter_namespaces(link)
        between = os.getpid()
        child = os.fork() if request.apart else 0
        if child:
            link.close()
            exit_as(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        # This is the id on this machine, because /proc is still the outer one.
        pid = int(os.readlink("/proc/self"))
        if request.apart:
            end_with_parent(signal.SIGKILL)
        listeners = set_up_namespaces(request) if request.apart else []
        hello = json.dumps({"pid": pid, "between": between}).encode()
        socket.send_fds(link, [hello], [listener.fileno() for listener in listeners])
        for listener in listeners:
            listener.close()
        link.close()
        if not request.apart:
            signal.signal(signal.SIGHUP, lambda *_: (kill_descendants(os.getpid()), exit_as(1)))
        status = run_command(request)
        if not request.apart:
            kill_descendants(os.getpid())
    except OSError as error:
        link.send(json.dumps({"refused": str(error)}).encode())
        status = 1
    exit_as(status)


def exit_as(status: int) -> None:
    """Exit with this status; a negative one, for a signal, becomes 128 plus the signal's number."""
    os._exit(128 - status if status < 0 else status)


def end_with_parent(number: int) -> None:
    """Ask the kernel to send this process that signal when its parent ends."""
    call_libc("prctl", PR_SET_PDEATHSIG, number, 0, 0, 0)


# -------------------------------------------------------------------------------------------------------------- outside


def list_descendants(pid: int) -> list[int]:
    """List the ids of all descendants of a process, parents first."""
    pids = [pid]
    for parent in pids:
        with contextlib.suppress(OSError):  # the process ended meanwhile
            for thread in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError):  # the thread ended meanwhile
                    pids += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
    return pids[1:]


def read_parent(pid: int) -> int:
    """Return the id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is neither a zombie nor dead."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def kill_descendants(pid: int) -> None:
    """Kill all descendants of a process; repeat until none is alive, since new ones may start meanwhile."""
    while left := [child for child in list_descendants(pid) if is_alive(child)]:
        for child in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def map_ids(pid: int) -> None:
    """Map every id to itself in the namespace: all ids for root, only the user's own ids otherwise."""
    place = Path(f"/proc/{pid}")
    if os.geteuid() == 0:
        uids, gids = Path("/proc/self/uid_map").read_text(), Path("/proc/self/gid_map").read_text()
        maps = {name: [line.split() for line in text.splitlines()] for name, text in (("uid", uids), ("gid", gids))}
        for name, lines in maps.items():
            text = "".join(f"{inner} {inner} {count}\n" for inner, _, count in lines)
            (place / f"{name}_map").write_text(text)
        return
    (place / "setgroups").write_text("deny")
    (place / "uid_map").write_text(f"{os.geteuid()} {os.geteuid()} 1\n")
    (place / "gid_map").write_text(f"{os.getegid()} {os.getegid()} 1\n")


@dataclass
class RunningCommand:
    """A running command; `pid` is the root process and `between` is the intermediate process, our child."""

    pid: int
    between: int
    apart: bool
    listeners: list[socket.socket]


def start_command(request: Request) -> RunningCommand:
    """Fork the process that runs the command. Raises OSError if there are no namespaces."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    between = os.fork()
    if not between:
        ours.close()
        run_inside(request, theirs)
    theirs.close()
    with ours:
        answer, handles, *_ = socket.recv_fds(ours, 4096, 64)
        if answer == b"map":
            with contextlib.suppress(OSError):
                map_ids(between)
                ours.send(b"mapped")
            ours.shutdown(socket.SHUT_WR)
            answer, handles, *_ = socket.recv_fds(ours, 4096, 64)
    hello = json.loads(answer or b'{"refused": "it ended"}')
    if "refused" in hello:
        os.waitpid(between, 0)
        raise OSError(hello["refused"])
    listeners = [socket.socket(fileno=handle) for handle in handles]
    return RunningCommand(hello["pid"], between, request.apart, listeners)


class RelayEnd(asyncio.Protocol):
    """One end of a relayed connection; its bytes go to `other`."""

    other: RelayEnd | None = None
    transport: asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)

    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        self.other.transport.write(data)

    def eof_received(self) -> bool:
        assert self.other is not None
        if self.other.transport.can_write_eof():
            with contextlib.suppress(OSError):
                self.other.transport.write_eof()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()

    def pause_writing(self) -> None:
        assert self.other is not None
        self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        assert self.other is not None
        self.other.transport.resume_reading()


class InnerRelayEnd(RelayEnd):
    """The inner end of a relayed connection: it reads only after the port outside has accepted."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._early = b""  # early data: some 3.11 releases read although reading was paused
        self._ended_early = False

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data
        else:
            super().data_received(data)

    def eof_received(self) -> bool:
        if self.other is None:
            self._ended_early = True
            return True
        return super().eof_received()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.pause_reading()
        self._connecting = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        try:
            _, other = await asyncio.get_running_loop().create_connection(RelayEnd, "127.0.0.1", self._port)
        except OSError:
            self.transport.abort()  # nothing listens outside, so inside the connection opens and closes
            return
        other.other, self.other = self, other
        if self._early:
            other.transport.write(self._early)
        if self._ended_early:
            self.eof_received()
        if self.transport.is_closing():
            other.transport.close()
        else:
            self.transport.resume_reading()


async def serve(started: RunningCommand) -> int:
    """Relay connections and obey the input until everything has ended; return the command's status."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    servers = [
        await loop.create_server(
            functools.partial(InnerRelayEnd, listener.getsockname()[1]), sock=listener, backlog=512
        )
        for listener in started.listeners
    ]

    def obey_input() -> None:
        loop.remove_reader(0)
        if not started.apart:
            kill_descendants(started.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(started.pid, signal.SIGKILL)

    watching = os.pidfd_open(started.between)
    loop.add_reader(watching, lambda: ended.done() or ended.set_result(os.waitpid(started.between, 0)[1]))
    loop.add_reader(0, obey_input)
    status = os.waitstatus_to_exitcode(await ended)
    for server in servers:
        server.close()
    return status


def list_attempts(request: Request) -> Iterator[Request]:
    """Yield the request with namespaces, if wanted, and then without."""
    if request.apart:
        yield request
    yield Request(**{**vars(request), "apart": False})


def main() -> None:
    """Read the request and serve it."""
    with open(0, "rb", buffering=0, closefd=False) as asked:  # unbuffered: others read the rest
        request = Request(**json.loads(asked.readline()))
    refused, started = None, None
    for attempt in list_attempts(request):
        try:
            started = start_command(attempt)
            break
        except OSError as error:
            refused = str(error)
    if started is None:
        raise SystemExit(f"the command could not be started: {refused}")
    why = None if started.apart else refused or "none were asked for"
    print(json.dumps({"pid": started.pid, "refused": why}), flush=True)
    exit_as(asyncio.run(serve(started)))


if __name__ == "__main__":
    main()
