"""Helpers for code that attacks its sandbox: they try operations and record the outcomes.

The tests put this text in front of a probe's code inside the sandbox. `numbers` (of system calls), `paths`, `pids` and
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
    """Run the action and record its value in `done`, or its error in `refused`, under the name."""
    try:
        done[name] = repr(action())[:300]
    except (OSError, ValueError) as error:
        refused[name] = errno.errorcode.get(getattr(error, "errno", None) or 0, str(error))


def checked(result):
    """Return the result of a C library function, or raise its error."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def call(name, *arguments):
    """Make a system call by its name, with arguments that are integers, bytes or ctypes values."""
    converted = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    ctypes.set_errno(0)
    return checked(libc.syscall(ctypes.c_long(globals()["numbers"][name]), *converted))


def read(path):
    """Return the first 200 bytes of a file."""
    with open(path, "rb") as file:
        return file.read(200)


def write(path, data=b"written by the code", flags=os.O_WRONLY):
    """Write into an existing file."""
    fd = os.open(path, flags)
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)


def send_signal_by_owner(pid, number):
    """Make the kernel signal the owner of a socket, which can be another process than the sender."""
    ours, theirs = socket.socketpair()
    fcntl.fcntl(ours, fcntl.F_SETOWN, pid)
    fcntl.fcntl(ours, 10, number)  # F_SETSIG
    fcntl.fcntl(ours, fcntl.F_SETFL, fcntl.fcntl(ours, fcntl.F_GETFL) | os.O_ASYNC)
    theirs.send(b"x")


def own_token():
    """Return this execution's token, read from the driver's channel."""
    frame: Any = sys._getframe()
    while not hasattr(frame.f_locals.get("self"), "_channel"):
        frame = frame.f_back
    return frame.f_locals["self"]._channel.token


def say(text, body):
    """Send a forged frame to the supervisor; `text` is its header without the body's size."""
    data = b'%s,"body":%d}\n%s\n' % (text.encode(), len(body), body)
    while data:
        data = data[os.write(4, data) :]
