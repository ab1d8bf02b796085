"""Attacks on mounted host data that code may only read, in sandboxes of root and of an ordinary user, on each level."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from ..boxes import Boxes

ATTACK = """
import mmap, shutil
here = os.environ["HOME"]
file = os.path.join(folder, "rows.csv")
attempt("read", lambda: read(file))
attempt("read below", lambda: os.listdir(os.path.join(folder, "sub")))
attempt("read alone", lambda: read(alone))
for name, path in {"file": file, "alone": alone}.items():
    attempt(f"{name} written", lambda: write(path))
    attempt(f"{name} appended", lambda: write(path, flags=os.O_WRONLY | os.O_APPEND))
    attempt(f"{name} emptied while reading", lambda: os.open(path, os.O_RDONLY | os.O_TRUNC))
    attempt(f"{name} cut", lambda: os.truncate(path, 0))
    attempt(f"{name} removed", lambda: os.unlink(path))
    attempt(f"{name} moved", lambda: os.rename(path, path + ".moved"))
    attempt(f"{name} covered", lambda: os.replace(shutil.copyfile(path, here + "/mine"), path))
    attempt(f"{name} linked home", lambda: write(os.link(path, here + "/linked") or here + "/linked"))
    attempt(f"{name} mapped", lambda: mmap.mmap(os.open(path, os.O_RDWR), 0))
    attempt(f"{name} by its descriptor", lambda: write(f"/proc/self/fd/{os.open(path, os.O_RDONLY)}"))
attempt("added", lambda: os.mkdir(os.path.join(folder, "new")))
attempt("through the link", lambda: read(os.path.join(folder, "out")))
attempt("beside", lambda: read(os.path.join(folder, "..", "secret")))
libc.mount.argtypes = None
for name, flags in {"writable": 4096 | 32, "moved mount": 8192, "over": 4096}.items():
    attempt(f"{name}", lambda: checked(libc.mount(here.encode(), folder.encode(), None, flags, None)))
attempt("unmounted", lambda: checked(libc.umount2(folder.encode(), 2)))
MODES = {"mode": lambda: os.chmod(file, 0o777), "times": lambda: os.utime(file, (1, 1)),
         "owner": lambda: os.chown(folder, os.getuid(), os.getgid())}
for action in MODES.values():  # one level says that it was done, and does nothing
    try:
        action()
    except OSError:
        pass
"""

CONNECT = """
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    attempt(f"connected {kind}", lambda: socket.socket(socket.AF_UNIX, kind).connect(os.path.join(folder, "agent")))
attempt("sent", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", folder + "/agent"))
"""


@pytest.mark.each_once
def test_code_reads_mounted_data_and_cannot_change_or_leave_it(own_box: Boxes, open_folder: Path) -> None:
    folder, alone, secret = (open_folder / "mounted" / name for name in ("data", "alone.bin", "secret"))
    (folder / "sub").mkdir(parents=True, exist_ok=True)
    for path in (folder / "rows.csv", alone, secret, folder / "sub" / "x"):
        path.write_text("1,2\n")
    (folder / "out").unlink(missing_ok=True)
    (folder / "out").symlink_to(secret)
    is_own_path = own_box().level != "bubblewrap"
    places = {str(path) if is_own_path else f"/data/{path.name}": str(path) for path in (folder, alone)}
    box = own_box(mounts=places)
    for path in (folder.parent, *folder.parent.rglob("*")):
        # If the host is an ordinary user, the code runs as the owner of these files.
        os.chown(path, box.host.uid, box.host.uid, follow_symlinks=False)
    before = _describe(folder.parent)
    at_folder, at_alone = places
    attempts = box.run_attempts(ATTACK, folder=at_folder, alone=at_alone)
    assert set(attempts.done) == {"read", "read below", "read alone"}, attempts
    assert _describe(folder.parent) == before
    with socket.socket(socket.AF_UNIX) as server:  # this socket did not exist when the sandbox opened
        try:
            server.bind(str(folder / "agent"))
            os.chmod(folder / "agent", 0o777)
            server.listen()
            attempts = box.run_attempts(CONNECT, folder=at_folder)
        finally:
            (folder / "agent").unlink(missing_ok=True)
    assert not attempts.done, attempts


def _describe(folder: Path) -> dict[str, Any]:
    statuses = {str(path): path.lstat() for path in [folder, *sorted(folder.rglob("*"))]}
    return {
        path: (item.st_mode, item.st_uid, item.st_mtime_ns, item.st_size, item.st_nlink)
        for path, item in statuses.items()
    }
