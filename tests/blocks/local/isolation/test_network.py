"""Attempts of code in a local sandbox to reach a network, on each isolation level."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rlm_batch import CodeError, LocalInterpreter

from ....infra.requirements import mark_level
from ..boxes import unconfined

if TYPE_CHECKING:
    from rlm_batch import LocalSandbox

    from ..boxes import Box
    from ..targets import Servers

REACH = """
for name, address in addresses.items():
    address = tuple(address) if isinstance(address, list) else address
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    datagram = name == "udp" or "datagram" in name
    kind = socket.SOCK_DGRAM if datagram else socket.SOCK_STREAM
    def reach(make):
        with make() as ours:
            ours.settimeout(60)
            if datagram:
                ours.sendto(b"hello", address)
            else:
                ours.connect(address)
    attempt(name, lambda: reach(lambda: socket.socket(family, kind)))
    if family == socket.AF_UNIX:
        for kind in (kind, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
            attempt(f"{name} from a pair of {kind}", lambda: reach(lambda: socket.socketpair(family, kind)[0]))
"""


@pytest.mark.older_kernels(0, 1, 3)
def test_code_cannot_reach_servers_of_the_host(box: Box, servers: Servers) -> None:
    unconfined(box).run_attempts(REACH, addresses=servers.names)
    assert servers.list_reached() == set(servers.names)
    while servers.list_reached():
        pass
    attempts = box.run_attempts(REACH, addresses=servers.names)
    assert servers.list_reached() == set(), attempts
    # In the sandbox's own network a datagram can be sent, but it reaches no server.
    assert not [name for name in attempts.done if box.level == "landlock" or not name.startswith("udp")]


@pytest.mark.parametrize(
    "local", [pytest.param(level, marks=mark_level(level)) for level in ("landlock", "bubblewrap")], indirect=True
)
def test_an_error_of_code_without_a_network_says_what_to_do(local: LocalSandbox) -> None:
    with LocalInterpreter(isolation=local.isolation) as interpreter:
        for code in (
            "from urllib.request import urlopen\nurlopen('https://example.com')",
            "import socket\nsocket.create_connection(('192.0.2.1', 80))",
            "import asyncio\nawait asyncio.open_connection('192.0.2.1', 80)",
            "import socket\ntry: socket.gethostbyname('example.com')\nexcept OSError as e: raise ValueError from e",
            "import subprocess\nsubprocess.check_call('echo Could not resolve host: a >&2; exit 6', shell=True)",
        ):
            with pytest.raises(CodeError, match="\nThe sandbox has no network: get the data before, and pass it as a"):
                interpreter.execute(code)


@pytest.mark.older_kernels(0, 1, 3)
def test_code_cannot_open_other_kinds_of_sockets(box: Box) -> None:
    attempts = box.run_attempts("""
KINDS = {"packet": 17, "vsock": 40, "alg": 38, "bluetooth": 31, "can": 29, "key": 15, "tipc": 30, "xdp": 44, "nfc": 39,
         "rxrpc": 33, "rds": 21, "kcm": 41, "qipcrtr": 42, "smc": 43, "ax25": 3, "x25": 9, "appletalk": 5, "mctp": 45}
for name, family in KINDS.items():
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        attempt(f"{name} {kind}", lambda: socket.socket(family, kind).close())
        attempt(f"pair of {name} {kind}", lambda: [end.close() for end in socket.socketpair(family, kind)])
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
attempt("raw 6", lambda: socket.socket(socket.AF_INET6, socket.SOCK_RAW, 58))
""")
    assert attempts.done == {}
    # EAFNOSUPPORT would mean that the call reached the kernel, and that only the kernel's configuration refuses it.
    assert {name: error for name, error in attempts.refused.items() if error not in ("EPERM", "EACCES")} == {}


def test_the_network_has_no_way_out(box: Box) -> None:
    attempts = box.run_attempts("""
for name, address in (("test network", ("192.0.2.1", 80)), ("broadcast", ("255.255.255.255", 9))):
    def reach(kind):
        with socket.socket(socket.AF_INET, kind) as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            ours.settimeout(60)
            ours.connect(address)
            ours.send(b"x")
    attempt(name, lambda: reach(socket.SOCK_STREAM))
    attempt(f"{name} datagram", lambda: reach(socket.SOCK_DGRAM))
attempt("name", lambda: socket.getaddrinfo("example.org", 80))
""")
    assert attempts.done == {}
