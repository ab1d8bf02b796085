"""A network namespace with only loopback, in which the kernel counts attempts to reach other addresses.

`make_command` returns the command line. It runs a command in a new network namespace and writes the count to a file.
The kernel has no route to other addresses and counts each attempt, whatever language the program is written in. The
name server has such an address too, so each look-up counts. Without root, the command also gets a new user namespace.
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
NAME_SERVER = "192.0.2.53"  # an address reserved for documentation


def make_command(count: Path, *command: str) -> list[str]:
    """Return a command line that runs a command in the namespace and writes the count; it has the command's status."""
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from tests.deployments.network_namespace import main; main()"
    )
    return [sys.executable, "-IS", "-c", program, str(ROOT), str(count), *command]


def leave_network() -> None:
    """Move this process into a network namespace with only loopback."""
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
    """Return how often the kernel found no route, for IPv4 and IPv6."""
    names, values = (line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines()[:2])
    count = int(values[names.index("OutNoRoutes")])
    version_6 = Path("/proc/self/net/snmp6")
    lines = version_6.read_text().splitlines() if version_6.exists() else []
    return count + sum(int(line.split()[1]) for line in lines if line.startswith("Ip6OutNoRoutes"))


def main() -> None:
    """Run the command and write the count."""
    path, *command = sys.argv[1:]
    leave_network()
    status = subprocess.run(command, check=False).returncode
    Path(path).write_text(str(count_refusals()))
    sys.exit(status if status >= 0 else 128 - status)
