"""Ports of loopback for programs that are told theirs and listen some seconds later."""

import secrets
import socket

# Below those that the kernel gives away by itself (net.ipv4.ip_local_port_range, from 32768 on): one of those may be
# anybody's by the time that the program listens.
PORTS = range(20000, 32000)


def choose_port() -> int:
    """A port that is free, and that only who asks for it by number gets. Raises RuntimeError if none is found."""
    for _ in range(100):
        port = secrets.choice(PORTS)  # the tests of other processes may have seeded `random` alike
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port from {PORTS.start} to {PORTS.stop - 1}")
