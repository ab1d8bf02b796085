"""A machine with nothing but loopback for a command, whose kernel counts what it would send elsewhere.

`make_command` is the command line. It runs the command in a network namespace of its own, and writes to a file how
often something there, whatever it was written in, wanted a way to another address than loopback: the kernel has none,
and counts that it has none. Names are looked up at an address of that kind, so that each look-up counts. Without root
the namespace is a user's.
"""

import os
import socket
import struct
import subprocess
import sys
import tempfile
from fcntl import ioctl
from pathlib import Path

from ..standins.mount_namespace import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWUSER,
    MS_BIND,
    MS_PRIVATE,
    MS_REC,
    call_libc,
    mount,
)

ROOT = Path(__file__).resolve().parents[2]
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
NAME_SERVER = "192.0.2.53"  # of the addresses that are for documentation


def make_command(count: Path, *command: str) -> list[str]:
    """The command line that runs a command so, and writes the count to that file. Its status is the command's."""
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from tests.deployments.network_namespace import main; main()"
    )
    return [sys.executable, "-IS", "-c", program, str(ROOT), str(count), *command]


def leave_network() -> None:
    """Leaves this machine's network for one of loopback alone."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        call_libc("unshare", CLONE_NEWNET | CLONE_NEWNS)
    else:
        call_libc("unshare", CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path("/proc/self", name).write_text(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(f"nameserver {NAME_SERVER}\noptions timeout:1 attempts:1\n")
        file.flush()
        mount(file.name, "/etc/resolv.conf", flags=MS_BIND)


def count_refusals() -> int:
    """How often the kernel had no way to an address, of both versions of IP."""
    names, values = (line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines()[:2])
    found = int(values[names.index("OutNoRoutes")])
    version_6 = Path("/proc/self/net/snmp6")
    lines = version_6.read_text().splitlines() if version_6.exists() else []
    return found + sum(int(line.split()[1]) for line in lines if line.startswith("Ip6OutNoRoutes"))


def main() -> None:
    """Runs the command, and writes down the count."""
    path, *command = sys.argv[1:]
    leave_network()
    status = subprocess.run(command, check=False).returncode
    Path(path).write_text(str(count_refusals()))
    sys.exit(status if status >= 0 else 128 - status)
