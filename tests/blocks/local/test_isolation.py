"""What code in a local sandbox cannot do, on each rung, as root and as an ordinary user; and what it can."""

from __future__ import annotations

import ast
import ctypes
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ...infra.isolation_levels import landlock

if TYPE_CHECKING:
    from .conftest import Box, Boxes, Files, Servers, Victim

ENVIRONMENT_SECRET = "of the environment"
FILE_SECRET = "of the file"


def unconfined(box: Box) -> Box:
    """The same host's sandbox without isolation: an attack must succeed there, or it proves nothing."""
    return type(box)(box.host, "none")


# ------------------------------------------------------------------------------------------------------------- files

READ = """
import shutil, subprocess, tempfile
for name, path in paths.items():
    attempt(name, lambda: read(path))
    attempt(f"{name} by cat", lambda: subprocess.run(["cat", path], capture_output=True).stdout or read(path))
    attempt(f"{name} copied", lambda: shutil.copy(path, tempfile.mkdtemp()))
    attempt(f"{name} mapped", lambda: __import__("mmap").mmap(os.open(path, os.O_RDONLY), 0, prot=1)[:])
    link = tempfile.mktemp()
    os.symlink(path, link)
    attempt(f"{name} by a symlink", lambda: read(link))
    attempt(f"{name} by a hard link", lambda: (os.link(path, link + ".hard"), read(link + ".hard")))
    attempt(f"{name} in another directory's place", lambda: (os.rename(path, link + ".moved"), read(link + ".moved")))
    attempt(f"{name} through O_PATH", lambda: read(f"/proc/self/fd/{os.open(path, os.O_PATH)}"))
    attempt(f"{name} through the root", lambda: read(f"/proc/self/root{path}"))
    attempt(f"{name} through init's root", lambda: read(f"/proc/1/root{path}"))
    attempt(f"{name} by the way up", lambda: read("../" * 20 + path[1:]))
    directory = os.path.dirname(path)
    attempt(f"{name} from its directory", lambda: (os.chdir(directory), read("secret")))
    os.chdir(os.environ["HOME"])
    attempt(f"{name} listed", lambda: os.listdir(directory))
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    mount = ctypes.c_int()
    target = path.encode()
    attempt(f"{name} by its handle", lambda: call("name_to_handle_at", -100, target, handle, ctypes.byref(mount), 0))
"""


@pytest.mark.older_kernels
def test_files_of_the_host_cannot_be_read(box: Box, files: Files) -> None:
    open_there = unconfined(box).tried(READ, paths=files.paths()).done
    assert {"home", "home by cat", "home by a symlink", "tmp", "tmp by cat", "tmp mapped"} <= set(open_there)
    files.home.write_text(FILE_SECRET)  # the attempts have moved it
    files.tmp.write_text(FILE_SECRET)
    found = box.tried(READ, paths=files.paths())
    assert found.done == {}
    assert files.home.read_text() == files.tmp.read_text() == FILE_SECRET


SYSTEM_SECRETS = """
import pathlib
for path in ("/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/hostname", "/etc/machine-id", "/var/log/dpkg.log",
             "/proc/kcore", "/proc/kmsg", "/dev/kmsg", "/dev/mem", "/var/lib/dpkg/status", "/boot", "/var"):
    if os.path.lexists(path):
        attempt(path, lambda: os.listdir(path) if os.path.isdir(path) else read(path))
for path in paths:
    attempt(path, lambda: os.listdir(path))
attempt("one that is open", lambda: read("/etc/shadow-that-is-not-there"))
"""


@pytest.mark.older_kernels
def test_what_the_system_keeps_to_itself_cannot_be_read(box: Box) -> None:
    places = [str(box.host.home), str(box.host.folders)]
    assert {*places} <= set(unconfined(box).tried(SYSTEM_SECRETS, paths=places).done)
    found = box.tried(SYSTEM_SECRETS, paths=places).done
    # The way to an interpreter below the home directory may be there, with nothing beside it.
    way = Path(box.outputs("SUBMIT(prefix=sys.base_prefix)")["prefix"]).parts
    assert {path: listed for path, listed in found.items() if listed not in [repr([part]) for part in way]} == {}


def test_the_root_directory_shows_nothing_of_the_host(box: Box, files: Files) -> None:
    found = box.tried("""
attempt("root", lambda: sorted(os.listdir("/")))
attempt("tmp", lambda: os.listdir("/tmp"))
attempt("home", lambda: os.listdir("/home"))
attempt("sys", lambda: os.listdir("/sys"))
attempt("run", lambda: os.listdir("/run"))
""")
    if box.rung == "landlock":
        assert found.done == {}
    else:
        assert set(found.done) <= {"root", "tmp", "run"}
        assert not {path.name for path in files.tmp.parents} & set(ast.literal_eval(found.done["tmp"]))
        assert not {"home", "var", "mnt", "opt", "srv"} & set(ast.literal_eval(found.done.get("root", "[]")))


WRITE = """
import shutil, subprocess, tempfile
for name, path in paths.items():
    directory = os.path.dirname(path)
    new = os.path.join(directory, "new")
    attempt(f"{name} written", lambda: write(path))
    attempt(f"{name} appended to", lambda: write(path, flags=os.O_WRONLY | os.O_APPEND))
    attempt(f"{name} emptied", lambda: os.close(os.open(path, os.O_WRONLY | os.O_TRUNC)))
    attempt(f"{name} emptied while reading", lambda: os.close(os.open(path, os.O_RDONLY | os.O_TRUNC)))
    attempt(f"{name} emptied without reading or writing", lambda: os.close(os.open(path, 3 | os.O_TRUNC)))
    attempt(f"{name} cut", lambda: os.truncate(path, 1))
    attempt(f"{name} mapped", lambda: __import__("mmap").mmap(os.open(path, os.O_RDWR), 0).write(b"!"))
    attempt(f"{name} linked", lambda: os.link(path, new + ".hard"))
    own = tempfile.mkstemp()[1]
    attempt(f"{name} replaced", lambda: os.rename(own, path))
    attempt(f"{name} replaced by a copy", lambda: shutil.copyfile(own, path))
    attempt(f"{name} removed", lambda: os.unlink(path))
    attempt(f"{name} made beside", lambda: os.close(os.open(new, os.O_CREAT | os.O_WRONLY)))
    attempt(f"{name} a directory beside", lambda: os.mkdir(new + ".d"))
    attempt(f"{name} a link beside", lambda: os.symlink("x", new + ".l"))
    attempt(f"{name} a pipe beside", lambda: os.mkfifo(new + ".p"))
    attempt(f"{name} nameless beside", lambda: os.close(os.open(directory, os.O_TMPFILE | os.O_RDWR)))
    link = tempfile.mktemp()
    os.symlink(path, link)
    attempt(f"{name} by a symlink", lambda: write(link))
    os.symlink(new + ".by.symlink", link + ".2")
    attempt(f"{name} made by a symlink", lambda: os.close(os.open(link + ".2", os.O_CREAT | os.O_WRONLY)))
    shell = f"echo x >> '{path}'"
    attempt(f"{name} by a shell", lambda: subprocess.run(shell, shell=True, check=True, stderr=subprocess.DEVNULL))
"""


@pytest.mark.older_kernels
def test_files_of_the_host_cannot_be_written(box: Box, files: Files) -> None:
    code = WRITE.replace("subprocess.run(shell", "failing_as_oserror(shell")
    code = (
        """
def failing_as_oserror(*args, **kwargs):
    try:
        subprocess.run(*args, **kwargs)
    except subprocess.CalledProcessError as error:
        raise OSError(1, str(error))
"""
        + code
    )
    everywhere = {"tmp written", "tmp emptied while reading", "tmp emptied without reading or writing", "tmp cut"}
    assert everywhere <= set(unconfined(box).tried(code, paths=files.paths()).done)
    for path in (files.home, files.tmp):
        for other in path.parent.iterdir():
            other.rmdir() if other.is_dir() and not other.is_symlink() else other.unlink()
        path.write_text(FILE_SECRET)
        path.chmod(0o666)
        os.chown(path, box.host.uid, box.host.uid)
    found = box.tried(code, paths=files.paths())
    assert found.done == {}
    assert files.home.read_text() == files.tmp.read_text() == FILE_SECRET
    assert [path.name for path in files.folder.iterdir()] == ["secret"]


def test_the_system_cannot_be_written(box: Box) -> None:
    found = box.tried("""
for path in ("/usr", "/usr/bin", "/etc", "/", "/bin", "/lib", "/usr/local/bin", "/var/tmp", "/dev", "/run", "/proc",
             "/sys", "/dev/shm" if not os.path.isdir("/sandbox") else "/etc", os.path.dirname(os.__file__)):
    attempt(path, lambda: os.close(os.open(os.path.join(path, "new"), os.O_CREAT | os.O_WRONLY)))
for path in ("/etc/passwd", "/etc/ld.so.cache", os.__file__, sys.executable, "/bin/sh"):
    attempt(path, lambda: os.close(os.open(path, os.O_WRONLY)))
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/vm/drop_caches",
             "/proc/sys/kernel/randomize_va_space", "/proc/sysrq-trigger", "/proc/sys/net/ipv4/ip_forward",
             "/proc/self/oom_score_adj", "/proc/self/uid_map", "/sys/kernel/mm/ksm/run", "/dev/kmsg"):
    attempt(path, lambda: os.close(os.open(path, os.O_WRONLY)))
""")
    assert found.done == {}


CHANGE = """
import pathlib, shutil
XFLAG_NOATIME, NODUMP, SETFLAGS = 0x40, 0x40, 0x40086602
for name, path in paths.items():
    attempt(f"{name} mode", lambda: os.chmod(path, 0o4700))
    attempt(f"{name} owner", lambda: os.chown(path, os.getuid(), os.getgid()))
    attempt(f"{name} times", lambda: os.utime(path, (1, 1)))
    attempt(f"{name} attribute", lambda: os.setxattr(path, "user.mark", b"x"))
    attempt(f"{name} status", lambda: shutil.copystat(os.environ["HOME"], path))
    value = ctypes.create_string_buffer(b"x")
    arguments = struct.pack("QII", ctypes.addressof(value), 1, 0)
    target = path.encode()
    attempt(f"{name} mark by a newer call", lambda: call("setxattrat", -100, target, 0, b"user.mark", arguments, 16))
    flags = struct.pack("QIIII", XFLAG_NOATIME, 0, 0, 0, 0)
    attempt(f"{name} flags by a newer call", lambda: call("file_setattr", -100, target, flags, 24, 0))
    attempt(f"{name} neither read nor written", lambda: os.open(path, 3))
    attempt(f"{name} flags", lambda: fcntl.ioctl(os.open(path, 3), SETFLAGS, struct.pack("l", NODUMP)))
    attempt(f"{name} from O_PATH", lambda: os.chmod(f"/proc/self/fd/{os.open(path, os.O_PATH)}", 0o4700))
    attempt(f"{name} lease", lambda: fcntl.fcntl(os.open(path, 3), fcntl.F_SETLEASE, fcntl.F_WRLCK))
    attempt(f"{name} directory's mode", lambda: os.chmod(os.path.dirname(path), 0))
"""


def state(path: Path) -> tuple[Any, ...]:
    """What of a file is no content: mode, owner, times, attributes and flags."""
    found = path.stat()
    flags = bytearray(8)
    with path.open("rb") as file, suppress(OSError):  # not every file system has any
        fcntl.ioctl(file, 0x80086601, flags)  # FS_IOC_GETFLAGS
    marks = os.listxattr(path)
    return oct(found.st_mode), found.st_uid, found.st_gid, found.st_mtime_ns, marks, bytes(flags)


@pytest.mark.older_kernels
def test_modes_owners_times_and_attributes_of_the_host_cannot_be_changed(box: Box, files: Files) -> None:
    before = {path: (state(path), path.parent.stat().st_mode) for path in (files.home, files.tmp)}
    found = box.tried(CHANGE, paths=files.paths())
    assert {path: (state(path), path.parent.stat().st_mode) for path in (files.home, files.tmp)} == before, found
    # An open that asks for neither reading nor writing still gives what ioctl works on.
    assert not [name for name in found.done if "neither" in name or "lease" in name or "flags" in name], found
    unconfined(box).tried(CHANGE, paths=files.paths())
    for path in (files.home, files.tmp):
        path.parent.chmod(0o777)
    assert {path: state(path) for path in before} != {path: known for path, (known, _) in before.items()}


def test_attributes_of_files_of_the_host_cannot_be_read(box: Box, files: Files) -> None:
    try:
        os.setxattr(files.tmp, "user.mark", b"secret")
    except OSError:
        pytest.skip("this file system has no attributes")
    code = """
attempt("names", lambda: os.listxattr(path) or read("/nothing/there"))
attempt("value", lambda: os.getxattr(path, "user.mark"))
"""
    assert set(unconfined(box).tried(code, path=str(files.tmp)).done) == {"names", "value"}
    assert box.tried(code, path=str(files.tmp)).done == {}


def test_directories_of_the_host_cannot_be_watched(box: Box, files: Files) -> None:
    code = """
attempt("watched", lambda: checked(libc.inotify_add_watch(checked(libc.inotify_init()), path.encode(), 0xFFF)))
"""
    assert unconfined(box).tried(code, path=str(files.folder)).done
    assert box.tried(code, path=str(files.folder)).done == {}


def test_devices_cannot_be_used(box: Box) -> None:
    found = box.tried(
        """
import glob, stat
KNOWN = {"null", "zero", "full", "random", "urandom"} | ({"ptmx"} if own_terminals else set())
try:
    names = os.listdir("/dev")
except OSError:
    names = ["mem", "kmsg", "kvm", "fuse", "tty", "tty0", "ptmx", "sda", "vda", "loop0", "net/tun", "vhost-net",
             "vsock", "dri/renderD128", "snd/seq", "input/event0", "hpet", "rtc0", "port", "console", "shm"]
for name in names:
    path = "/dev/" + name
    try:
        kind = os.stat(path).st_mode
    except OSError:
        continue
    if name in KNOWN or not (stat.S_ISCHR(kind) or stat.S_ISBLK(kind)):
        continue
    for flags in (os.O_RDWR, 3):
        attempt(f"{path} {flags}", lambda: os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)))
attempt("a new device", lambda: os.mknod("device", stat.S_IFBLK | 0o600, os.makedev(8, 0)))
attempt("a new character device", lambda: os.mknod("device", stat.S_IFCHR | 0o600, os.makedev(1, 1)))
""",
        own_terminals=box.rung == "bubblewrap",
    )
    assert found.done == {}


# ------------------------------------------------------------------------------------------------- environment, /proc


def test_the_environment_of_the_host_is_not_there(box: Box) -> None:
    found = box.outputs("""
try:
    initial = open("/proc/self/environ").read()
except OSError:
    initial = ""
SUBMIT(names=sorted(os.environ), values=list(os.environ.values()), initial=initial)
""")
    assert ENVIRONMENT_SECRET not in str(found)
    known = {"LC_CTYPE", "PATH", "HOME", "TMPDIR", "LANG", "PYTHONDONTWRITEBYTECODE", "PWD"}
    assert set(found["names"]) <= known
    assert str(box.host.home) not in found["values"]


PEEK = """
for name, pid in pids.items():
    pid = pid or os.getppid()
    for part in ("environ", "mem", "maps", "auxv", "stack", "syscall", "fd", "task", "cwd", "root", "exe", "ns/net"):
        path = f"/proc/{pid}/{part}"
        if part in ("fd", "task"):
            attempt(f"{name} {part}", lambda: [read(f"{path}/{entry}/mem") for entry in os.listdir(path)])
        elif part in ("cwd", "root", "exe", "ns/net"):
            attempt(f"{name} {part}", lambda: os.readlink(path))
            attempt(f"{name} {part} entered", lambda: os.chdir(path))
        else:
            attempt(f"{name} {part}", lambda: read(path))
    attempt(f"{name} mem written", lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR)))
    for number in range(8):
        attempt(f"{name} fd {number}", lambda: os.close(os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_NONBLOCK)))
    buffer = ctypes.create_string_buffer(8)
    vector = struct.pack("QQ", ctypes.addressof(buffer), 8)
    remote = struct.pack("QQ", address, 8)
    attempt(f"{name} process_vm_readv", lambda: call("process_vm_readv", pid, vector, 1, remote, 1, 0))
    attempt(f"{name} process_vm_writev", lambda: call("process_vm_writev", pid, vector, 1, remote, 1, 0))
    attempt(f"{name} attached to", lambda: call("ptrace", 16, pid, 0, 0))
    attempt(f"{name} seized", lambda: call("ptrace", 0x4206, pid, 0, 0))
    attempt(f"{name} compared", lambda: call("kcmp", os.getpid(), pid, 0, 1, 1))
    def steal():
        return call("pidfd_getfd", os.pidfd_open(pid), 0, 0)
    attempt(f"{name} descriptor taken", steal)
    attempt(f"{name} advised", lambda: call("process_madvise", os.pidfd_open(pid), remote, 1, 4, 0))
    attempt(f"{name} entered", lambda: call("setns", os.pidfd_open(pid), 0x20000))
    attempt(f"{name} pages", lambda: call("move_pages", pid, 0, 0, 0, 0, 0))
"""


@pytest.mark.older_kernels
def test_memory_and_descriptors_of_other_processes_cannot_be_had(box: Box, victim: Victim) -> None:
    address = int(Path(f"/proc/{victim.pid}/maps").read_text().split("-")[0], 16)
    pids = {"victim": victim.pid, "host": box.host.pid, "supervisor": 0, "init": 1}
    found = box.tried(PEEK, pids=pids, address=address)
    assert found.done == {}
    open_there = unconfined(box).tried(PEEK, pids={"victim": victim.pid}, address=address).done
    assert {"victim environ", "victim cwd"} <= set(open_there)
    assert ENVIRONMENT_SECRET in open_there["victim environ"]


def test_processes_of_the_host_cannot_be_listed(box: Box, victim: Victim) -> None:
    found = box.tried(
        """
attempt("listed", lambda: sorted(int(name) for name in os.listdir("/proc") if name.isdigit()))
attempt("victim", lambda: read(f"/proc/{pid}/cmdline"))
attempt("victim's state", lambda: read(f"/proc/{pid}/stat"))
""",
        pid=victim.pid,
    )
    if box.rung == "landlock":
        assert found.done == {}
        return
    assert set(found.done) == {"listed"}
    # Those of the sandbox, numbered from 1.
    assert max(map(int, found.done["listed"].strip("[]").split(", "))) < 1000


# ---------------------------------------------------------------------------------------------------------- signals

SIGNAL = """
for name, pid in pids.items():
    pid = pid or os.getppid()
    attempt(f"{name} asked", lambda: os.kill(pid, 0))
    attempt(f"{name} stopped", lambda: os.kill(pid, signal.SIGSTOP))
    attempt(f"{name} killed", lambda: os.kill(pid, signal.SIGKILL))
    attempt(f"{name} group killed", lambda: os.kill(-pid, signal.SIGKILL))
    attempt(f"{name} thread killed", lambda: call("tgkill", pid, pid, 9))
    attempt(f"{name} thread killed alone", lambda: call("tkill", pid, 9))
    information = bytes(4) + struct.pack("ii", 0, -1) + bytes(116)
    attempt(f"{name} queued", lambda: call("rt_sigqueueinfo", pid, 9, information))
    attempt(f"{name} queued for a thread", lambda: call("rt_tgsigqueueinfo", pid, pid, 9, information))
    attempt(f"{name} killed by descriptor", lambda: call("pidfd_send_signal", os.pidfd_open(pid), 9, 0, 0))
    # Says that it was done whether or not the signal came, or not.
    try:
        send_signal_by_owner(pid, signal.SIGKILL)
    except OSError:
        pass
attempt("victim woken", lambda: os.kill(pids["victim"], signal.SIGCONT))
try:
    os.kill(-1, signal.SIGCONT)  # harmless to the others whom it may reach; done, says the kernel in any case
except OSError:
    pass
"""


@pytest.mark.older_kernels
def test_other_processes_cannot_be_signalled(box: Box, victim: Victim) -> None:
    pids = {"victim": victim.pid, "host": box.host.pid, "supervisor": 0}
    victim.stop()
    found = box.tried(SIGNAL, pids=pids)
    assert victim.state == "T"
    victim.go_on()
    assert box.host.process.poll() is None
    assert found.done == {}
    assert box.outputs("SUBMIT(works=True)") == {"works": True}  # the supervisor's too
    assert {"victim killed"} <= set(unconfined(box).tried(SIGNAL, pids={"victim": victim.pid}).done)


LIMIT = """
import resource
for name, pid in pids.items():
    pid = pid or os.getppid()
    attempt(f"{name} limits read", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE))
    # What is there already, for whoever is reached has to live with it.
    attempt(f"{name} limited", lambda: resource.prlimit(pid, resource.RLIMIT_CORE, (0, resource.RLIM_INFINITY)))
    attempt(f"{name} priority", lambda: os.setpriority(os.PRIO_PROCESS, pid, 0))
    attempt(f"{name} disk priority", lambda: call("ioprio_set", 1, pid, 0))
    attempt(f"{name} processors", lambda: os.sched_setaffinity(pid, os.sched_getaffinity(0)))
    attempt(f"{name} policy", lambda: os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0)))
    attributes = struct.pack("IIQiIQQQ", 48, 0, 0, 0, 0, 0, 0, 0)
    attempt(f"{name} policy by a newer call", lambda: call("sched_setattr", pid, attributes, 0))
attempt("everyone's priority", lambda: os.setpriority(os.PRIO_USER, os.getuid(), 0))
"""


@pytest.mark.older_kernels
def test_limits_and_priorities_of_other_processes_cannot_be_changed(box: Box, victim: Victim) -> None:
    pids = {"victim": victim.pid, "host": box.host.pid, "supervisor": 0, "init": 1}
    assert box.tried(LIMIT, pids=pids).done == {}
    assert {"victim priority", "victim processors"} <= set(
        unconfined(box).tried(LIMIT, pids={"victim": victim.pid}).done
    )


# ---------------------------------------------------------------------------------------------------------- network

REACH = """
for name, address in addresses.items():
    address = tuple(address) if isinstance(address, list) else address
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    datagram = name == "udp" or "datagram" in name
    kind = socket.SOCK_DGRAM if datagram else socket.SOCK_STREAM
    def reach(make):
        with make() as ours:
            ours.settimeout(2)
            if datagram:
                ours.sendto(b"hello", address)
            else:
                ours.connect(address)
    attempt(name, lambda: reach(lambda: socket.socket(family, kind)))
    if family == socket.AF_UNIX:
        for kind in (kind, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
            attempt(f"{name} from a pair of {kind}", lambda: reach(lambda: socket.socketpair(family, kind)[0]))
"""


@pytest.mark.older_kernels
def test_servers_of_the_host_cannot_be_reached(box: Box, servers: Servers) -> None:
    unconfined(box).tried(REACH, addresses=servers.names)
    assert servers.reached() == set(servers.names)
    while servers.reached():
        pass
    found = box.tried(REACH, addresses=servers.names)
    assert servers.reached() == set(), found
    # In a network of its own a datagram goes out, to nobody.
    assert not [name for name in found.done if box.rung == "landlock" or not name.startswith("udp")]


@pytest.mark.older_kernels
def test_no_other_kind_of_socket_can_be_had(box: Box) -> None:
    found = box.tried("""
KINDS = {"packet": 17, "vsock": 40, "alg": 38, "bluetooth": 31, "can": 29, "key": 15, "tipc": 30, "xdp": 44, "nfc": 39,
         "rxrpc": 33, "rds": 21, "kcm": 41, "qipcrtr": 42, "smc": 43, "ax25": 3, "x25": 9, "appletalk": 5, "mctp": 45}
for name, family in KINDS.items():
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        attempt(f"{name} {kind}", lambda: socket.socket(family, kind).close())
        attempt(f"pair of {name} {kind}", lambda: [end.close() for end in socket.socketpair(family, kind)])
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
attempt("raw 6", lambda: socket.socket(socket.AF_INET6, socket.SOCK_RAW, 58))
""")
    assert found.done == {}
    # EAFNOSUPPORT would tell that the kernel was asked, and that nothing but its configuration keeps the family out.
    assert {name: error for name, error in found.refused.items() if error not in ("EPERM", "EACCES")} == {}


def test_the_network_has_no_way_out(box: Box) -> None:
    found = box.tried("""
for name, address in (("test network", ("192.0.2.1", 80)), ("broadcast", ("255.255.255.255", 9))):
    def reach(kind):
        with socket.socket(socket.AF_INET, kind) as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            ours.settimeout(1)
            ours.connect(address)
            ours.send(b"x")
    attempt(name, lambda: reach(socket.SOCK_STREAM))
    attempt(f"{name} datagram", lambda: reach(socket.SOCK_DGRAM))
attempt("name", lambda: socket.getaddrinfo("example.org", 80))
""")
    assert found.done == {}


# ---------------------------------------------------------------------------------------- other ways between processes


def test_shared_memory_of_the_host_cannot_be_had(box: Box) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    key = int.from_bytes(os.urandom(3), "big") | 0x10000000
    identifier = libc.shmget(key, 4096, 0o1666)
    if identifier < 0:
        pytest.skip("this machine has no shared memory of that kind")
    code = """
libc.shmat.restype = ctypes.c_ssize_t
attempt("found", lambda: checked(libc.shmget(key, 4096, 0o600)))
attempt("attached", lambda: checked(libc.shmat(identifier, None, 0)))
attempt("removed", lambda: checked(libc.shmctl(identifier, 0, None)))
"""
    try:
        assert (
            "found"
            in unconfined(box).tried(code.partition('attempt("removed"')[0], key=key, identifier=identifier).done
        )
        found = box.tried(code, key=key, identifier=identifier)
        assert "found" not in found.done
        assert box.rung == "bubblewrap" or found.done == {}
        assert libc.shmget(key, 4096, 0o600) == identifier
    finally:
        libc.shmctl(identifier, 0, None)


def test_nothing_stays_in_the_kernel_after_the_sandbox(own_box: Boxes) -> None:
    """Shared memory, semaphores and message queues outlive the process that made them."""
    key = int.from_bytes(os.urandom(3), "big") | 0x10000000
    name = f"rlm-batch-test-{key}"
    own_box().tried(
        """
attempt("memory", lambda: checked(libc.shmget(key, 4096, 0o1666)))
attempt("semaphores", lambda: checked(libc.semget(key, 1, 0o1666)))
attempt("messages", lambda: checked(libc.msgget(key, 0o1666)))
attempt("queue", lambda: call("mq_open", name.encode(), os.O_CREAT | os.O_RDWR, 0o666, 0))
attempt("key", lambda: call("add_key", b"user", b"mark", b"x", 1, -4))
""",
        key=key,
        name=name,
    )
    libc = ctypes.CDLL(None, use_errno=True)
    left = []
    for kind, identifier, remove in (
        ("memory", libc.shmget(key, 0, 0), lambda found: libc.shmctl(found, 0, None)),
        ("semaphores", libc.semget(key, 0, 0), lambda found: libc.semctl(found, 0, 0)),
        ("messages", libc.msgget(key, 0), lambda found: libc.msgctl(found, 0, None)),
    ):
        if identifier != -1:
            left.append(kind)
            remove(identifier)
    if hasattr(libc, "mq_unlink") and libc.mq_unlink(f"/{name}".encode()) == 0:
        left.append("queue")
    assert left == []


# ------------------------------------------------------------------------------------------------ kernel and privileges


@pytest.mark.older_kernels
def test_a_new_namespace_cannot_be_had(box: Box) -> None:
    found = box.tried("""
import subprocess
NEW = {"mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000,
       "pid": 0x20000000, "net": 0x40000000, "time": 0x80}
for name, flag in NEW.items():
    attempt(f"unshare {name}", lambda: call("unshare", flag))
    attempt(f"unshare {name} with user", lambda: call("unshare", flag | 0x10000000))
    def clone():
        pid = call("clone", flag | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    if name != "time":  # the bit belongs to the signal there
        attempt(f"clone {name}", clone)
    def clone3():
        arguments = struct.pack("8Q", flag, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
        pid = call("clone3", arguments, len(arguments))
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    attempt(f"clone3 {name}", clone3)
def command():
    if subprocess.run(["unshare", "--user", "--map-root-user", "true"], stderr=subprocess.DEVNULL).returncode:
        raise OSError(1, "refused")
attempt("unshare --user", command)
""")
    assert found.done == {}


@pytest.mark.older_kernels
def test_calls_that_reach_around_the_policy_are_refused(box: Box) -> None:
    found = box.tried("""
bad = -1
NAMES = ("io_uring_setup", "io_uring_enter", "io_uring_register", "bpf", "perf_event_open", "userfaultfd", "add_key",
         "request_key", "keyctl", "open_by_handle_at", "name_to_handle_at", "fanotify_init", "mount", "umount2",
         "pivot_root", "chroot", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr",
         "open_tree_attr", "setns", "unshare", "ptrace", "kcmp", "process_vm_readv", "process_vm_writev",
         "process_madvise", "pidfd_getfd", "init_module", "finit_module", "delete_module", "kexec_load",
         "kexec_file_load", "swapon", "swapoff", "acct", "quotactl", "quotactl_fd", "settimeofday", "clock_settime",
         "clock_adjtime", "adjtimex", "syslog", "sethostname", "setdomainname", "iopl", "ioperm")
for name in NAMES:
    if name in numbers:
        attempt(name, lambda: call(name, bad, bad, bad, bad, bad, bad))
attempt("typing into a terminal", lambda: fcntl.ioctl(0, 0x5412, b"x"))
""")
    assert found.done == {}
    # Another error would say that the kernel had looked at the arguments.
    assert {name: error for name, error in found.refused.items() if error not in ("EPERM", "ENOSYS")} == {}


def test_calls_in_another_machine_s_numbers_are_refused(box: Box) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("this machine has one set of numbers")
    found = box.tried('attempt("x32", lambda: checked(libc.syscall(ctypes.c_long(0x40000000 + 39))))')
    assert found.refused == {"x32": "EPERM"}
    answer = box.run("""
import mmap
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
SUBMIT(pid=function())
""")
    assert answer["error"]["error"] == "CodeCrashed", answer
    assert box.outputs("SUBMIT(works=True)") == {"works": True}


def test_no_privilege_is_left_or_can_be_had(box: Box) -> None:
    found = box.outputs("""
import glob, stat, subprocess
header = struct.pack("Ii", 0x20080522, 0)
sets = ctypes.create_string_buffer(24)
call("capget", header, sets)
words = struct.unpack("6I", sets.raw)
capabilities = words[0] | words[1] | words[3] << 32 | words[4] << 32
setuid = [path for place in ("/usr/bin", "/bin", "/usr/sbin", "/sbin") for path in glob.glob(place + "/*")
          if os.path.isfile(path) and os.stat(path).st_mode & stat.S_ISUID]
became = {}
for command in ("su -c id", "sudo -n id", "mount -t tmpfs none /mnt", "pkexec id", "newgrp root"):
    command = command.split()
    try:
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=0.5)
        became[command[0]] = ran.returncode, ran.stdout.decode()
    except (OSError, subprocess.TimeoutExpired):
        pass
for function, value in ((os.setuid, 0), (os.setgid, 0), (os.setuid, 1), (os.seteuid, 0), (os.setgroups, [0])):
    attempt(function.__name__, lambda: function(value))
SUBMIT(uid=os.getresuid(), groups=os.getgroups(), no_new=libc.prctl(39, 0, 0, 0, 0), capabilities=capabilities,
       became=became, done=done)
""")
    root = box.host.uid == 0
    assert (found["uid"][0] > 1000) if root else (found["uid"] == [box.host.uid] * 3)
    assert len(set(found["uid"])) == 1
    assert found["no_new"] == 1
    # Where the interpreter lies in a closed directory, root's code keeps the right to search; Landlock still decides.
    assert found["capabilities"] in ((0, 1 << 2) if root and box.rung == "landlock" else (0,))
    assert {name: outcome for name, outcome in found["became"].items() if outcome[0] == 0} == {}
    assert found["done"] == {}
    assert root is False or found["groups"] in ([], [found["uid"][0]])


def test_code_has_no_descriptors_but_its_own(box: Box) -> None:
    found = box.outputs("""
import stat
kinds = {}
for fd in range(4096):
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        continue
    kinds[str(fd)] = "pipe" if stat.S_ISFIFO(mode) else "device" if stat.S_ISCHR(mode) else oct(mode)
SUBMIT(kinds=kinds)
""")
    # Standard input, output and error, and the execution's own channel.
    assert found["kinds"] == {"0": "device", "1": "pipe", "2": "pipe", "3": "pipe", "4": "pipe"}


# ----------------------------------------------------------------------------------------------------------- limits


def test_memory_beyond_the_limit_ends_the_execution_alone(own_box: Boxes) -> None:
    box = own_box(memory_mib=256)
    for code in ("data = bytearray(600 * 1024 * 1024)", "data = []\nwhile True: data.append(bytearray(1 << 20))"):
        error = box.run(code)["error"]
        assert error["error"] == "CodeCrashed"
        assert error["out_of_memory"] is True
    error = box.run("""
attempt("mapped", lambda: __import__("mmap").mmap(-1, 600 << 20))
raise MemoryError if refused else RuntimeError(done)
""")["error"]
    assert error["error"] == "CodeCrashed"
    assert box.outputs("SUBMIT(works=True)") == {"works": True}


def test_a_limit_cannot_be_raised(own_box: Boxes) -> None:
    found = own_box(memory_mib=256, processes=40, file_size_mib=1, cpu_seconds=30).tried("""
import resource
for name in ("AS", "NPROC", "FSIZE", "CPU", "CORE"):
    which = getattr(resource, "RLIMIT_" + name)
    attempt(name, lambda: resource.setrlimit(which, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)))
    attempt(f"{name} of itself", lambda: resource.prlimit(os.getpid(), which, (1 << 40, 1 << 40)))
""")
    assert found.done == {}


def test_a_fork_bomb_stays_below_the_limit(own_box: Boxes) -> None:
    box = own_box(processes=50)
    code = """
children = []
for _ in range(200):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    children.append(pid)
SUBMIT(children=len(children))
"""
    # The supervisor counts too, and bubblewrap, where they run as the same user.
    assert 30 <= box.outputs(code)["children"] <= 50
    # The children of the first have gone with it.
    assert 30 <= box.outputs(code)["children"] <= 50


def test_a_bomb_of_threads_stays_below_the_limit(own_box: Boxes) -> None:
    found = own_box(processes=50).outputs("""
import threading
gate = threading.Event()
started = 0
try:
    for _ in range(200):
        threading.Thread(target=gate.wait, daemon=True).start()
        started += 1
except RuntimeError:
    pass
gate.set()
SUBMIT(started=started)
""")
    assert 30 <= found["started"] <= 50


@pytest.mark.each_once
def test_processor_seconds_beyond_the_limit_end_the_execution_alone(own_box: Boxes) -> None:
    box = own_box(cpu_seconds=1)
    error = box.run("while True: pass")["error"]
    assert error["error"] == "CodeCrashed"
    assert "CPU seconds" in error["text"]
    assert box.outputs("SUBMIT(works=True)") == {"works": True}


def test_a_file_beyond_the_limit_cannot_be_written(own_box: Boxes) -> None:
    found = own_box(file_size_mib=1).outputs("""
import mmap, tempfile
attempt("small", lambda: open("small", "wb").write(bytes(1 << 20)))
attempt("large", lambda: open("large", "wb").write(bytes(2 << 20)))
attempt("sparse", lambda: os.truncate("small", 2 << 20))
fd = os.open("allocated", os.O_CREAT | os.O_RDWR)
attempt("allocated", lambda: os.posix_fallocate(fd, 0, 2 << 20))
memory = os.memfd_create("memory")
attempt("in memory", lambda: os.ftruncate(memory, 2 << 20))
SUBMIT(done=done, refused=refused, largest=max(os.path.getsize(name) for name in os.listdir()))
""")
    assert set(found["done"]) == {"small"}
    assert found["largest"] <= 1 << 20


# -------------------------------------------------------------------------------------------------- what still works

WORKS = {
    "a subprocess": """
import subprocess
assert subprocess.run(["echo", "hi"], capture_output=True, text=True).stdout == "hi\\n"
assert subprocess.run("exit 3", shell=True).returncode == 3
""",
    "a Python of its own": """
import subprocess
ran = subprocess.run([sys.executable, "-c", "import ssl, sqlite3; print(6 * 7)"], capture_output=True, text=True)
assert ran.stdout == "42\\n", ran
""",
    "a script in its folder": """
with open("script.py", "w") as file:
    file.write("print(__file__)")
import subprocess
assert subprocess.run([sys.executable, "script.py"], capture_output=True, text=True).stdout.endswith("script.py\\n")
""",
    "an executable in its folder": """
import subprocess
fd = os.open("tool", os.O_CREAT | os.O_WRONLY, 0o755)
os.write(fd, b"#!/bin/sh\\necho tool\\n")
os.close(fd)
assert subprocess.run(["./tool"], capture_output=True, text=True).stdout == "tool\\n"
""",
    "a module in its folder": """
with open("of_its_own.py", "w") as file:
    file.write("value = 5")
import of_its_own
assert of_its_own.value == 5
""",
    "threads": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    assert sum(pool.map(abs, range(100))) == 4950
""",
    "temporary files": """
import tempfile
with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile(dir=folder) as file:
    file.write(b"x")
with tempfile.TemporaryFile() as file:
    file.write(b"x")
with tempfile.NamedTemporaryFile() as file:
    file.write(b"x")
""",
    "sqlite3": """
import sqlite3
with sqlite3.connect("data.db") as db:
    db.execute("pragma journal_mode=wal")
    db.execute("create table if not exists t (x)")
    db.execute("insert into t values (1)")
assert db.execute("select count(*) from t").fetchone()[0] >= 1
""",
    "ssl": """
import ssl
assert ssl.create_default_context().cert_store_stats()["x509"] >= 0
""",
    "an event loop": """
import asyncio
async def main():
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    out, _ = await process.communicate(b"hello")
    return out, await asyncio.to_thread(int, "5"), await asyncio.sleep(0, "slept")
assert asyncio.run(main()) == (b"hello", 5, "slept")
""",
    "copies with their status": """
import shutil
with open("original", "w") as file:
    file.write("text")
shutil.copy2("original", "copied")
shutil.copytree(".", "../tmp/tree" if os.path.isdir("../tmp/.") and os.getcwd() != "/sandbox" else "/tmp/tree",
                dirs_exist_ok=True, ignore=shutil.ignore_patterns("tree"))
assert open("copied").read() == "text"
os.chmod("copied", 0o600)
os.utime("copied", (1, 1))
shutil.move("copied", "moved")
""",
    "archives": """
import tarfile, zipfile
with open("packed", "w") as file:
    file.write("text")
with tarfile.open("a.tar.gz", "w:gz") as archive:
    archive.add("packed")
with tarfile.open("a.tar.gz") as archive:
    archive.extractall("unpacked")
with zipfile.ZipFile("a.zip", "w") as archive:
    archive.write("packed")
with zipfile.ZipFile("a.zip") as archive:
    archive.extractall("unzipped")
assert open("unpacked/packed").read() == open("unzipped/packed").read() == "text"
""",
    "hashes": """
import hashlib, hmac, secrets, uuid, random
hashlib.sha256(b"x").hexdigest(), secrets.token_hex(), uuid.uuid4(), random.SystemRandom().random()
""",
    "decimals": "import decimal, fractions\nassert decimal.Decimal(1) / 3",
    "time zones": """
import datetime, zoneinfo
assert zoneinfo.available_timezones() or not os.path.isdir("/usr/share/zoneinfo")
if os.path.isdir("/usr/share/zoneinfo"):
    assert datetime.datetime.now(zoneinfo.ZoneInfo("Europe/Berlin"))
time.localtime()
""",
    "socket pairs": """
ours, theirs = socket.socketpair()
ours.send(b"x")
assert theirs.recv(1) == b"x"
""",
    "the count of processors": "assert os.cpu_count() >= 1 and len(os.sched_getaffinity(0)) >= 1",
    "its own affinity and priority": """
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.nice(1)
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
""",
    "signals to itself": """
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
os.kill(os.getpid(), signal.SIGUSR1)
signal.raise_signal(signal.SIGUSR1)
signal.pthread_kill(__import__("threading").get_ident(), signal.SIGUSR1)
signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
assert len(heard) == 4
""",
    "locks on files": """
with open("locked", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    fcntl.lockf(file, fcntl.LOCK_UN)
""",
    "maps of memory": """
import mmap
with open("mapped", "w+b") as file:
    file.write(bytes(4096))
    file.flush()
    with mmap.mmap(file.fileno(), 0) as memory:
        memory[0] = 1
assert open("mapped", "rb").read(1) == b"\\1"
assert len(mmap.mmap(-1, 4096)) == 4096
""",
    "forks": """
pid = os.fork()
if pid == 0:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
""",
    "most of the library": """
import argparse, base64, bisect, bz2, calendar, cmath, collections, configparser, contextlib, copy, csv, ctypes
import dataclasses, difflib, email, enum, functools, getpass, glob, gzip, heapq, html, http.client, inspect, io
import itertools, json, locale, logging, lzma, math, mimetypes, operator, pathlib, pickle, platform, pprint, queue
import re, shlex, statistics, string, textwrap, typing, unicodedata, unittest, urllib.request, warnings, weakref
platform.platform(), mimetypes.guess_type("a.txt"), locale.getlocale(), pathlib.Path.home()
""",
}


@pytest.mark.parametrize("what", WORKS)
def test_what_keeps_working(box: Box, what: str) -> None:
    assert box.outputs(WORKS[what] + "\nSUBMIT(works=True)") == {"works": True}


@pytest.mark.older_kernels
def test_a_network_that_is_not_there_is_an_ordinary_error(box: Box) -> None:
    found = box.outputs("""
import urllib.error, urllib.request
try:
    urllib.request.urlopen("http://127.0.0.1:9/", timeout=2)
except urllib.error.URLError as error:
    SUBMIT(refused=isinstance(error.reason, OSError))
""")
    assert found == {"refused": True}


def test_processes_that_code_starts_can_be_signalled_by_it(box: Box) -> None:
    """From Landlock's ABI 6 on; below, only itself (test_local_isolation's older kernels)."""
    code = """
import subprocess
process = subprocess.Popen(["sleep", "60"], start_new_session=True)
process.terminate()
assert process.wait(10) == -signal.SIGTERM
process = subprocess.Popen(["sleep", "60"], start_new_session=True)
os.killpg(process.pid, signal.SIGKILL)
assert process.wait(10) == -signal.SIGKILL
try:
    subprocess.run(["sleep", "60"], timeout=0.1)
except subprocess.TimeoutExpired:
    SUBMIT(works=True)
"""
    if landlock() < 6:
        pytest.skip("this kernel's Landlock does not know signals")
    assert box.outputs(code) == {"works": True}


def test_multiprocessing_works_in_a_mount_namespace(box: Box) -> None:
    if box.rung == "landlock":
        pytest.skip("needs /dev/shm, which is the host's here")
    code = """
import multiprocessing
context = multiprocessing.get_context("fork")
with context.Pool(2) as pool:
    SUBMIT(total=sum(pool.map(abs, range(10))))
"""
    assert box.outputs(code) == {"total": 45}


def test_the_folder_belongs_to_the_code_alone(box: Box) -> None:
    folder = box.host.folders / box.run("open('mine', 'w').write('x')")["sandbox"]
    before = folder.stat().st_mode
    assert (folder / "work" / "mine").read_text() == "x"
    assert stat.S_IMODE(before) & 0o007 == 0  # other users cannot enter
    found = box.tried("""
work = os.environ["HOME"]
attempt("record", lambda: read("../sandbox.json"))
attempt("record written", lambda: write("../sandbox.json"))
attempt("beside", lambda: os.mkdir("../beside"))
attempt("moved", lambda: os.rename(work, work + ".moved"))
attempt("removed", lambda: os.rmdir(os.path.join(os.path.dirname(os.environ["TMPDIR"]), "tmp")))
try:
    os.chmod("..", 0o777)
except OSError:
    pass
""")
    assert found.done == {}
    assert folder.stat().st_mode == before
    assert sorted(path.name for path in folder.iterdir()) == ["sandbox.json", "tmp", "work"]
