"""What code under test finds when it starts: names for trying things, and for telling what came of each.

Its text stands in front of the code of a probe, inside the sandbox. `numbers` (system calls) and `paths`, `pids` and
the like are variables of the execution.
"""

import ctypes
import errno
import fcntl
import os
import signal  # noqa: F401 - the attacks use it
import socket
import struct  # noqa: F401 - the attacks use it
import sys
import time  # noqa: F401 - the attacks use it
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
done, refused = {}, {}


def attempt(name, action):
    """Does it, and records under the name what it gave, or the error that refused it."""
    try:
        done[name] = repr(action())[:300]
    except (OSError, ValueError) as error:
        refused[name] = errno.errorcode.get(getattr(error, "errno", None) or 0, str(error))


def checked(result):
    """The result of a function of the C library's; its error is raised."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def call(name, *arguments):
    """A system call by its name. Arguments are integers, bytes, or what ctypes takes."""
    given = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    ctypes.set_errno(0)
    return checked(libc.syscall(ctypes.c_long(globals()["numbers"][name]), *given))


def read(path):
    """The beginning of a file."""
    with open(path, "rb") as file:
        return file.read(200)


def write(path, data=b"written by the code", flags=os.O_WRONLY):
    """Writes into a file that is there already."""
    fd = os.open(path, flags)
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)


def send_signal_by_owner(pid, number):
    """Makes the kernel send a signal to the owner of a socket, who need not be the process that asked."""
    ours, theirs = socket.socketpair()
    fcntl.fcntl(ours, fcntl.F_SETOWN, pid)
    fcntl.fcntl(ours, 10, number)  # F_SETSIG
    fcntl.fcntl(ours, fcntl.F_SETFL, fcntl.fcntl(ours, fcntl.F_GETFL) | os.O_ASYNC)
    theirs.send(b"x")


def own_token():
    """The token of this execution, out of the driver's channel."""
    frame: Any = sys._getframe()
    while not hasattr(frame.f_locals.get("self"), "_channel"):
        frame = frame.f_back
    return frame.f_locals["self"]._channel.token


def say(text, body):
    """A frame of our own making on the channel to the supervisor; `text` is its header without the body's size."""
    data = b'%s,"body":%d}\n%s\n' % (text.encode(), len(body), body)
    while data:
        data = data[os.write(4, data) :]
