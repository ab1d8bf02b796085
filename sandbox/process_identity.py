"""Which process of which machine something belongs to, as a text by which it is known later that the process has ended.

The text is `BOOT.NAMESPACE.PID.STARTED`: the id that the kernel has from one start of the machine to the next, the
number of the namespace that process ids are counted in, the process's id there, and when it was started, in clock ticks
since the machine was. They are at most 63 characters, of digits and dots and a to f, as Modal allows in a tag.
"""

import os
import re

PATTERN = re.compile(r"([0-9a-f]{32}\.[0-9]{1,10})\.([1-9][0-9]{0,6})\.([0-9]{1,11})")

_identities: dict[int, str] = {}  # this process's, by its id: it stays, and every sandbox is labelled with it
os.register_at_fork(after_in_child=_identities.clear)  # in another namespace the same number is another process


def read_own_identity() -> str:
    """This process's identity; empty where the kernel does not tell it, as on other systems than Linux."""
    pid = os.getpid()
    if pid not in _identities and (identity := _read_identity(pid)):
        _identities[pid] = identity
    return _identities.get(pid, "")


def _read_identity(pid: int) -> str:
    try:
        if os.readlink("/proc/self") != str(pid):
            return ""  # it is that of another namespace, whose process of this id is another one
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            boot = file.read().strip().replace("-", "")
        identity = f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}.{pid}.{_read_process(pid)[0]}"
    except OSError:
        return ""
    return identity if PATTERN.fullmatch(identity) else ""


def is_process_alive(identity: str) -> bool | None:
    """Whether the process of that identity is there; None where it is not one that this process could see."""
    given, own = PATTERN.fullmatch(identity), PATTERN.fullmatch(read_own_identity())
    if given is None or own is None or given[1] != own[1]:
        return None
    pid, started = int(given[2]), int(given[3])
    try:
        os.kill(pid, 0)  # /proc may hide what is another user's
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        return _read_process(pid) == (started, True)
    except OSError:
        return None


def _read_process(pid: int) -> tuple[int, bool]:
    """When a process was started, and whether any of it still runs. Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        words = file.read().rpartition(b")")[2].split()
    # One that was killed stays, as its last thread, until its parent asks for its status.
    return int(words[19]), words[0] not in (b"Z", b"X") or int(words[17]) > 1
