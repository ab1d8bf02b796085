"""The identity of a process: a text from which another process can later find out whether the process has ended.

The text is `BOOT.NAMESPACE.PID.STARTED`: the kernel's id of the current boot, the number of the PID namespace, the
process id in it, and the start time in clock ticks since boot. It has at most 63 characters of digits, dots and a to f,
as Modal's tags allow.
"""

import os
import re

from .wire.process_table import read_process

PATTERN = re.compile(r"([0-9a-f]{32}\.[0-9]{1,10})\.([1-9][0-9]{0,6})\.([0-9]{1,11})")

# A cache of this process's identity, by process id. The identity never changes, and every sandbox gets it as a label.
_identities: dict[int, str] = {}
# A fork in another PID namespace can have the same process id, but has another identity.
os.register_at_fork(after_in_child=_identities.clear)


def read_own_identity() -> str:
    """Return this process's identity. Return "" if the kernel does not provide it, as on systems other than Linux."""
    pid = os.getpid()
    if pid not in _identities:
        identity = _read_identity(pid)
        if not identity:
            return ""
        _identities[pid] = identity
    return _identities[pid]


def _read_identity(pid: int) -> str:
    try:
        if os.readlink("/proc/self") != str(pid):
            return ""  # /proc belongs to another namespace, where this id is another process.
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            boot = file.read().strip().replace("-", "")
        namespace = os.stat("/proc/self/ns/pid").st_ino
        started = read_process(pid)[1]
        identity = f"{boot}.{namespace}.{pid}.{started}"
    except OSError:
        return ""
    return identity if PATTERN.fullmatch(identity) else ""


def is_process_alive(identity: str) -> bool | None:
    """Return True if the process is running, False if it has ended, None if it is not visible from this process."""
    parts = PATTERN.fullmatch(identity)
    own_parts = PATTERN.fullmatch(read_own_identity())
    if parts is None or own_parts is None:
        return None
    if parts[1] != own_parts[1]:  # another boot or PID namespace
        return None
    pid = int(parts[2])
    started = int(parts[3])
    try:
        os.kill(pid, 0)  # Signal 0 only checks, even if /proc hides other users' processes.
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        _, started_now, state = read_process(pid)
    except OSError:
        return None
    is_same_process = started_now == started  # Otherwise, a later process has the same id.
    return is_same_process and state not in "ZX"  # neither a zombie nor dead
