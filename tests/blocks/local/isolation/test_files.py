"""Attempts of code in a local sandbox to read or change the host's files, on each isolation level."""

from __future__ import annotations

import ast
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ..boxes import unconfined
from ..targets import FILE_SECRET

if TYPE_CHECKING:
    from ..boxes import Box
    from ..targets import Files

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


@pytest.mark.older_kernels(0, 1)
def test_files_of_the_host_cannot_be_read(box: Box, files: Files) -> None:
    open_there = unconfined(box).run_attempts(READ, paths=files.paths()).done
    assert {"home", "home by cat", "home by a symlink", "tmp", "tmp by cat", "tmp mapped"} <= set(open_there)
    files.home.write_text(FILE_SECRET)  # the attempts moved the file
    files.tmp.write_text(FILE_SECRET)
    attempts = box.run_attempts(READ, paths=files.paths())
    assert attempts.done == {}
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


@pytest.mark.older_kernels(0, 1)
def test_private_system_files_cannot_be_read(box: Box) -> None:
    places = [str(box.host.home), str(box.host.folders)]
    assert {*places} <= set(unconfined(box).run_attempts(SYSTEM_SECRETS, paths=places).done)
    attempts = box.run_attempts(SYSTEM_SECRETS, paths=places).done
    # If the interpreter is below the home directory, code sees its parent folders, but no other entries in them.
    way = Path(box.outputs("SUBMIT(prefix=sys.base_prefix)")["prefix"]).parts
    assert {path: listed for path, listed in attempts.items() if listed not in [repr([part]) for part in way]} == {}


def test_the_root_directory_shows_nothing_of_the_host(box: Box, files: Files) -> None:
    attempts = box.run_attempts("""
attempt("root", lambda: sorted(os.listdir("/")))
attempt("tmp", lambda: os.listdir("/tmp"))
attempt("home", lambda: os.listdir("/home"))
attempt("sys", lambda: os.listdir("/sys"))
attempt("run", lambda: os.listdir("/run"))
""")
    if box.level == "landlock":
        assert attempts.done == {}
    else:
        assert set(attempts.done) <= {"root", "tmp", "run"}
        assert not {path.name for path in files.tmp.parents} & set(ast.literal_eval(attempts.done["tmp"]))
        assert not {"home", "var", "mnt", "opt", "srv"} & set(ast.literal_eval(attempts.done.get("root", "[]")))


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


@pytest.mark.older_kernels(0, 1, 2)
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
    assert everywhere <= set(unconfined(box).run_attempts(code, paths=files.paths()).done)
    for path in (files.home, files.tmp):
        for other in path.parent.iterdir():
            other.rmdir() if other.is_dir() and not other.is_symlink() else other.unlink()
        path.write_text(FILE_SECRET)
        path.chmod(0o666)
        os.chown(path, box.host.uid, box.host.uid)
    attempts = box.run_attempts(code, paths=files.paths())
    assert attempts.done == {}
    assert files.home.read_text() == files.tmp.read_text() == FILE_SECRET
    assert [path.name for path in files.folder.iterdir()] == ["secret"]


def test_the_system_cannot_be_written(box: Box) -> None:
    attempts = box.run_attempts("""
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
    assert attempts.done == {}


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
    """Return a file's metadata: mode, owner, times, attributes and flags."""
    status = path.stat()
    flags = bytearray(8)
    with path.open("rb") as file, suppress(OSError):  # not every file system has flags
        fcntl.ioctl(file, 0x80086601, flags)  # FS_IOC_GETFLAGS
    marks = os.listxattr(path)
    return oct(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns, marks, bytes(flags)


@pytest.mark.older_kernels(0, 1, 4)
def test_modes_owners_times_and_attributes_of_the_host_cannot_be_changed(box: Box, files: Files) -> None:
    before = {path: (state(path), path.parent.stat().st_mode) for path in (files.home, files.tmp)}
    attempts = box.run_attempts(CHANGE, paths=files.paths())
    assert {path: (state(path), path.parent.stat().st_mode) for path in (files.home, files.tmp)} == before, attempts
    # `os.open` with mode 3 neither reads nor writes, but returns a descriptor that ioctl accepts. So it must fail.
    assert not [name for name in attempts.done if "neither" in name or "lease" in name or "flags" in name], attempts
    unconfined(box).run_attempts(CHANGE, paths=files.paths())
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
    assert set(unconfined(box).run_attempts(code, path=str(files.tmp)).done) == {"names", "value"}
    assert box.run_attempts(code, path=str(files.tmp)).done == {}


def test_directories_of_the_host_cannot_be_watched(box: Box, files: Files) -> None:
    code = """
attempt("watched", lambda: checked(libc.inotify_add_watch(checked(libc.inotify_init()), path.encode(), 0xFFF)))
"""
    assert unconfined(box).run_attempts(code, path=str(files.folder)).done
    assert box.run_attempts(code, path=str(files.folder)).done == {}


def test_devices_cannot_be_used(box: Box) -> None:
    attempts = box.run_attempts(
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
        own_terminals=box.level == "bubblewrap",
    )
    assert attempts.done == {}
