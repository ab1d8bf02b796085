"""A private file system and private processes for a command, made by system calls from Python alone.

    python -IS tests/standins/mount_namespace.py '{"mounts": [["read", "/", "/"], ...], "cwd": "/", ...}' COMMAND ...

`make_command` returns that command line. The command ends with the process that started it, and its own processes end
with it. It has no capabilities. Without root, it also runs in a new user namespace.
"""

import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_MOUNT_SETATTR = 442
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = -100, 0x8000, 1
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# The mounts of a private file system, in order: "bind" (source, target), "read" (source, target; read only), "tmpfs"
# (target), "dir" (target), "proc" (target) and "dev" (target).
Mount = tuple[str, ...]


def make_command(
    command: Sequence[str], mounts: Sequence[Mount], cwd: str = "/", has_network: bool = True
) -> list[str]:
    """Return a command line that runs a command with these mounts, the first of which is its root.

    Its status is the command's, or 128 plus the signal's number if a signal ended the command.
    """
    request = {"mounts": mounts, "cwd": cwd, "has_network": has_network}
    return [find_python(), "-IS", os.path.abspath(__file__), json.dumps(request), *command]


def find_python() -> str:
    """Return the path of the base Python, which needs no virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def find_refusal() -> str:
    """Return why this machine cannot make such file systems, in words; empty if it can."""
    mounts = [("read", "/", "/"), ("tmpfs", "/home"), ("proc", "/proc"), ("dev", "/dev")]
    try:
        probe = subprocess.run(make_command(["true"], mounts), check=False, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return probe.stderr.strip() or f"the probe ended with {probe.returncode}" if probe.returncode else ""


# ------------------------------------------------------------------------------------------------------- in the process


def call_libc(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError, whose message contains the function's name."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Call mount(2)."""
    words = [os.fsencode(word) or None for word in (source, target, kind, options)]
    call_libc("mount", words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])


def enter_namespaces(has_network: bool) -> None:
    """Leave this machine's mounts and processes; the child that is forked next is process 1."""
    wanted = CLONE_NEWNS | CLONE_NEWPID | (0 if has_network else CLONE_NEWNET)
    uid, gid = os.geteuid(), os.getegid()
    try:
        if uid:
            raise PermissionError
        call_libc("unshare", wanted)
    except PermissionError:
        call_libc("unshare", wanted | CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def make_file_system(mounts: Sequence[Mount]) -> None:
    """Make these mounts; the first becomes the root."""
    sources = {word: os.path.realpath(word) for kind, word, *_ in mounts if kind in ("bind", "read")}
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    # The old and the new root are mounted on this tmpfs, which no path in either of them leads to.
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV)
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    for kind, *words in mounts:
        make_mount(kind, "/old" + sources[words[0]] if kind in ("bind", "read") else "", "/new" + words[-1])
    os.chdir("/new")
    pivot_root(".", ".")
    call_libc("umount2", b".", MNT_DETACH)
    os.chdir("/")


def pivot_root(new: str, old: str) -> None:
    """Call pivot_root(2)."""
    call_libc("syscall", SYS_PIVOT_ROOT[os.uname().machine], os.fsencode(new), os.fsencode(old))


def make_mount(kind: str, source: str, target: str) -> None:
    """Make one mount below the new root; `source` is below the old root."""
    if source and not os.path.isdir(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.exists(target):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    else:
        os.makedirs(target, exist_ok=True)
    if source:
        mount(source, target, flags=MS_BIND | MS_REC)
        if kind == "read":
            attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
            call_libc("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(target), AT_RECURSIVE, attributes, 32)
    elif kind == "proc":
        mount("proc", target, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    elif kind == "tmpfs":
        mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    elif kind == "dev":
        make_mount("tmpfs", "", target)
        for name in DEVICES:
            if os.path.exists(f"/old/dev/{name}"):
                make_mount("bind", f"/old/dev/{name}", f"{target}/{name}")
        for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
            os.symlink(f"/proc/self/fd/{number}", f"{target}/{name}")
        os.symlink("/proc/self/fd", f"{target}/fd")
        os.mkdir(f"{target}/shm")
        os.chmod(f"{target}/shm", 0o1777)


def drop_capabilities() -> None:
    """Deny capabilities to every program that this process starts."""
    call_libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    capability = 0
    try:
        while True:
            call_libc("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
            capability += 1
    except OSError:
        pass  # the kernel has no further capabilities


def end_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends."""
    call_libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def wait_and_exit(child: int, null: int) -> None:
    """Release the child's standard streams, reap orphans, and exit with the child's status."""
    for number in (0, 1, 2):
        os.dup2(null, number)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(128 - code if code < 0 else code)


def main() -> None:
    """Run the command among the requested mounts."""
    request, command = json.loads(sys.argv[1]), sys.argv[2:]
    end_with_parent()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)  # opened before entering a root that may have no /dev/null
    try:
        enter_namespaces(request["has_network"])
        if child := os.fork():
            wait_and_exit(child, null)
        end_with_parent()
        make_file_system(request["mounts"])
        os.makedirs(request["cwd"], exist_ok=True)
        os.chdir(request["cwd"])
        drop_capabilities()
        if child := os.fork():
            wait_and_exit(child, null)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


if __name__ == "__main__":
    main()
