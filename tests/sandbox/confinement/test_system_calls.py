"""Tests of the system call filter against the kernel's table: each call is denied, checked, or allowed for a reason.

The tests interpret the filter as the kernel would, for both architectures.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from rlm_batch.sandbox.confinement import system_calls
from rlm_batch.sandbox.confinement.policy import MACHINES, OWN_PID, Policy


def read_words(name: str) -> list[str]:
    """Return the words of a file in this folder, without its comments."""
    lines = Path(__file__).with_name(name).read_text().splitlines()
    return [word for line in lines if not line.startswith("#") for word in line.split()]


TABLE = {
    name: tuple(None if number == "-" else int(number) for number in numbers)
    for name, *numbers in (call.split(":") for call in read_words("system_calls.txt"))
}
ALLOWED_CALLS = read_words("allowed_calls.txt")
ALLOWED, KILLED = "allowed", "killed"
ERRORS = {0: "ignored", 1: "EPERM", 13: "EACCES", 25: "ENOTTY", 38: "ENOSYS", 95: "ENOTSUP"}
LANDLOCK = {"network": False, "own_mounts": False, "own_uid": False}
BUBBLEWRAP = {"network": True, "own_mounts": True, "own_uid": False}
arches = pytest.mark.parametrize("arch", MACHINES)


def run_filter(program: str, audit: int, number: int, arguments: tuple[int, ...] = ()) -> str:
    """Return the filter's answer to a system call."""
    words = [argument & (1 << 64) - 1 for argument in (*arguments, *([0] * 6))[:6]]
    data = struct.pack("<IIQ6Q", number, audit, 0, *words)
    instructions = list(struct.iter_unpack("<HBBI", bytes.fromhex(program)))
    at, value = 0, 0
    while True:
        operation, if_true, if_false, operand = instructions[at]
        at += 1
        if operation == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        elif operation == 0x54:
            value &= operand
        elif operation == 0x05:
            at += operand
        elif operation == 0x06:
            kind = operand & 0xFFFF0000
            return {0x7FFF0000: ALLOWED, 0x80000000: KILLED}.get(kind) or ERRORS[operand & 0xFFFF]
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[operation]
            at += if_true if holds else if_false


class Filter:
    """The filter of one kind of sandbox on one architecture."""

    def __init__(self, arch: str, *, abi: int = 6, **kind: bool) -> None:
        self.column, self.audit = MACHINES[arch]
        self.program = Policy(readable=(), writable=(), abi=abi, **kind).build_seccomp_filter(arch)
        program = bytes.fromhex(self.program)
        assert len(program) // 8 <= 4096  # the kernel's limit on instructions
        # The driver writes its id over these bytes, so they may occur only in operands.
        assert {match.start() % 8 for match in re.finditer(re.escape(struct.pack("<I", OWN_PID)), program)} <= {4}

    def ask(self, name: str, *arguments: int) -> str:
        """Return the answer to a call; "absent" if the architecture has no such call."""
        number = TABLE[name][self.column]
        return "absent" if number is None else run_filter(self.program, self.audit, number, arguments)


@pytest.fixture(params=MACHINES)
def landlock(request: pytest.FixtureRequest) -> Filter:
    """Return the filter of a sandbox that sees the host's files."""
    return Filter(request.param, **LANDLOCK)


@pytest.fixture(params=MACHINES)
def bubblewrap(request: pytest.FixtureRequest) -> Filter:
    """Return the filter of a sandbox with its own namespaces."""
    return Filter(request.param, **BUBBLEWRAP)


def test_every_call_of_the_table_is_refused_or_allowed_for_a_reason() -> None:
    assert len(ALLOWED_CALLS) == len(set(ALLOWED_CALLS))
    assert set(ALLOWED_CALLS) & set(system_calls.CALLS) == set()
    known = {name for name, numbers in TABLE.items() if min(filter(None, numbers)) < system_calls.FIRST_UNKNOWN_CALL}
    assert {*ALLOWED_CALLS, *system_calls.CALLS} == known


def test_the_filter_has_the_numbers_of_the_table() -> None:
    assert {name: TABLE[name] for name in system_calls.CALLS} == system_calls.CALLS
    for column in (0, 1):
        numbers = [pair[column] for pair in TABLE.values() if pair[column] is not None]
        assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("kind", [LANDLOCK, BUBBLEWRAP], ids=["landlock", "bubblewrap"])
@arches
def test_each_system_call_is_treated_as_listed(arch: str, kind: dict[str, bool]) -> None:
    filter_ = Filter(arch, **kind)
    for name in ALLOWED_CALLS:
        assert filter_.ask(name, *[-1] * 6) in (ALLOWED, "absent"), name
    expected = dict.fromkeys(system_calls.DENIED_CALLS, "EPERM") | dict.fromkeys(system_calls.ABSENT_CALLS, "ENOSYS")
    if kind == LANDLOCK:
        expected |= dict.fromkeys(system_calls.IGNORED_CALLS, "ignored")
        expected |= dict.fromkeys(system_calls.ATTRIBUTE_CHANGES, "ignored")
        expected |= dict.fromkeys(system_calls.ATTRIBUTE_READS, "ENOTSUP")
        expected |= dict.fromkeys(system_calls.KERNEL_MEMORY_CALLS, "EPERM")
        expected |= dict.fromkeys(system_calls.ADDRESS_CALLS, "EPERM")
    for name, answer in expected.items():
        assert filter_.ask(name, *[-1] * 6) in (answer, "absent"), name


@arches
def test_setting_a_paths_times_to_now_is_refused(arch: str) -> None:
    filter_ = Filter(arch, **LANDLOCK)
    for path in (1, 1 << 32):
        assert filter_.ask("utimensat", -100, path, 0, 0) == "EACCES"
        for name, arguments in {"utime": (path, 0), "utimes": (path, 0), "futimesat": (-100, path, 0)}.items():
            assert filter_.ask(name, *arguments) in ("EACCES", "absent")
        for times in (1, 1 << 32):
            assert filter_.ask("utimensat", -100, path, times, 0) == "ignored"
    assert filter_.ask("utimensat", 3, 0, 0, 0) == "ignored"  # names a descriptor instead of a path


@arches
def test_numbers_outside_the_table_fail_as_absent(arch: str) -> None:
    filter_ = Filter(arch, **BUBBLEWRAP)
    numbers = {pair[filter_.column] for pair in TABLE.values() if (pair[filter_.column] or 0) < 463}
    first = max(number for number in numbers if number is not None and number < 424) + 1
    for number in [*range(first, 424), *range(463, 600)]:
        assert run_filter(filter_.program, filter_.audit, number) == "ENOSYS", number


@arches
def test_a_system_call_of_another_architecture_kills_the_process(arch: str) -> None:
    filter_ = Filter(arch, **BUBBLEWRAP)
    for audit in {audit for _, audit in MACHINES.values()} - {filter_.audit} | {0x40000003}:
        assert run_filter(filter_.program, audit, 39) == KILLED
    if arch == "x86_64":  # x32
        assert run_filter(filter_.program, filter_.audit, 0x40000000 + 39) == "EPERM"


FS_IOC_SETFLAGS, FS_IOC_ENABLE_VERITY, BTRFS_IOC_SNAP_CREATE = 0x40086602, 0x40806685, 0x50009401
TIOCSTI, TIOCSETD, TCGETS, TCGETS2, FIONREAD, TIOCGWINSZ = 0x5412, 0x5423, 0x5401, 0x802C542A, 0x541B, 0x5413
FIOCLEX, FICLONE, SIOCGIFCONF, SIOCSPGRP = 0x5451, 0x40049409, 0x8912, 0x8902


def test_only_known_ioctl_requests_are_allowed(landlock: Filter, bubblewrap: Filter) -> None:
    for filter_ in (landlock, bubblewrap):
        for request in (TCGETS, TCGETS2, FIONREAD, TIOCGWINSZ, FIOCLEX, FICLONE):
            assert filter_.ask("ioctl", 0, request) == ALLOWED
            assert filter_.ask("ioctl", 0, request | 1 << 40) == ALLOWED  # the kernel ignores the upper 32 bits
        for request in (TIOCSTI, TIOCSETD, SIOCSPGRP, TIOCSTI | 1 << 32):
            assert filter_.ask("ioctl", 0, request) == "EPERM"
        for request in (FS_IOC_SETFLAGS, FS_IOC_ENABLE_VERITY, BTRFS_IOC_SNAP_CREATE, 0, 0xFFFFFFFF):
            assert filter_.ask("ioctl", 0, request) == "ENOTTY"
    assert landlock.ask("ioctl", 0, SIOCGIFCONF) == "ENOTTY"
    assert bubblewrap.ask("ioctl", 0, SIOCGIFCONF) == ALLOWED


UNIX, INET, INET6, NETLINK, PACKET, ALG, VSOCK = 1, 2, 10, 16, 17, 38, 40
STREAM, DGRAM, RAW, SEQPACKET, NONBLOCKING = 1, 2, 3, 5, 0o4000 | 0o2000000


def test_only_unix_tcp_udp_and_address_listing_sockets_are_allowed(landlock: Filter, bubblewrap: Filter) -> None:
    good = [(UNIX, kind, 0) for kind in (STREAM, DGRAM, SEQPACKET)] + [(NETLINK, RAW, 0), (NETLINK, DGRAM, 0)]
    good += [(family, STREAM, protocol) for family in (INET, INET6) for protocol in (0, 6)]
    good += [(family, DGRAM, protocol) for family in (INET, INET6) for protocol in (0, 17)]
    for family, kind, protocol in good:
        assert bubblewrap.ask("socket", family, kind, protocol) == ALLOWED
        assert bubblewrap.ask("socket", family, kind | NONBLOCKING, protocol) == ALLOWED
        assert landlock.ask("socket", family, kind, protocol) == "EPERM"
    bad = [(family, STREAM, 0) for family in (0, PACKET, ALG, VSOCK, 45)]
    bad += [(INET, RAW, 6), (INET, RAW, 0), (INET6, SEQPACKET, 132), (INET, STREAM, 132), (INET, STREAM, 262)]
    bad += [(INET, DGRAM, 1), (NETLINK, RAW, 6), (NETLINK, RAW, 12), (NETLINK, RAW, 17)]
    for call in bad:
        assert bubblewrap.ask("socket", *call) == "EPERM"
    assert [filter_.ask("socketpair", UNIX, STREAM, 0) for filter_ in (landlock, bubblewrap)] == [ALLOWED] * 2
    assert [filter_.ask("socketpair", UNIX, DGRAM, 0) for filter_ in (landlock, bubblewrap)] == ["EPERM", ALLOWED]


@arches
def test_with_a_mounted_directory_only_pairs_of_unix_sockets_are_allowed(arch: str) -> None:
    filter_ = Filter(arch, **BUBBLEWRAP, unix_sockets=False)
    assert [filter_.ask("socket", UNIX, kind, 0) for kind in (STREAM, DGRAM, SEQPACKET)] == ["EPERM"] * 3
    assert [filter_.ask("socketpair", UNIX, kind, 0) for kind in (STREAM, DGRAM)] == [ALLOWED, "EPERM"]
    assert [filter_.ask("socket", INET, kind, 0) for kind in (STREAM, DGRAM)] == [ALLOWED] * 2


def test_a_new_process_cannot_change_its_namespace_or_parent(bubblewrap: Filter) -> None:
    fork, vfork, thread = 17, 0x4111, 0x3D0F00
    assert [bubblewrap.ask("clone", flags) for flags in (fork, vfork, thread)] == [ALLOWED] * 3
    namespaces = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
    for flag in (*namespaces, 0x8000):
        assert bubblewrap.ask("clone", fork | flag) == "EPERM"


def test_a_process_can_change_only_its_limits_and_never_its_mark(bubblewrap: Filter) -> None:
    own, other, cpu, rss = OWN_PID, 4711, 0, 5
    assert bubblewrap.ask("prlimit64", 0, cpu, 1 << 40, 0) == ALLOWED
    assert bubblewrap.ask("prlimit64", own, cpu, 0x1000, 0) == ALLOWED
    assert bubblewrap.ask("prlimit64", other, cpu, 0, 0x1000) == "EPERM"
    assert bubblewrap.ask("prlimit64", 0, rss, 0, 0x1000) == ALLOWED
    assert bubblewrap.ask("prlimit64", other, rss, 0, 0x1000) == "EPERM"
    for place in (0x1000, 1 << 32, 1 << 47):
        assert bubblewrap.ask("prlimit64", 0, rss, place, 0) == "EPERM"
    assert bubblewrap.ask("setrlimit", cpu, 0x1000) == ALLOWED
    assert bubblewrap.ask("setrlimit", rss, 0x1000) == "EPERM"


def test_the_personality_can_be_read_but_not_changed(bubblewrap: Filter) -> None:
    assert [bubblewrap.ask("personality", value) for value in (0, 0xFFFFFFFF)] == [ALLOWED] * 2
    assert [bubblewrap.ask("personality", value) for value in (0x0040000, 0x0400000, 8)] == ["EPERM"] * 3
