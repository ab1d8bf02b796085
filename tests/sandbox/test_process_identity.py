"""Tests of the text that identifies a process on its machine, even after the process has ended."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from rlm_batch.sandbox.process_identity import is_process_alive, read_own_identity

from ..infra.requirements import ORDINARY_UID
from ..standins.mount_namespace import Mount, make_command

pytestmark = [pytest.mark.requires("linux"), pytest.mark.usefixtures("no_process_left")]
ASK = """
import sys
from rlm_batch.sandbox.process_identity import is_process_alive, read_own_identity
print(read_own_identity(), *map(is_process_alive, sys.argv[1:]), flush=True)
sys.stdin.read()
"""
OTHER_BOOT = "0" * 32


@contextmanager
def query_identities(
    *identities: str, mounts: Sequence[Mount] = ()
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Start a process, and yield it with its own identity and its answers about these identities."""
    command = [sys.executable, "-c", ASK, *identities]
    command = make_command(command, mounts, os.getcwd()) if mounts else command
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().rstrip("\n").split(" ")
        finally:
            process.kill()


def test_a_killed_process_is_dead_before_its_parent_reaps_it() -> None:
    own = read_own_identity()
    assert re.fullmatch(r"[a-zA-Z0-9._-]{1,63}", own)  # valid in a tag of Modal
    assert is_process_alive(own) is True
    with query_identities(own) as (process, (identity, seen)):
        assert seen == "True"
        assert identity.split(".")[2] == str(process.pid)
        assert is_process_alive(identity) is True
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # leaves the process a zombie
        assert is_process_alive(identity) is False
    assert is_process_alive(identity) is False


def test_a_process_that_reuses_the_id_is_another_process() -> None:
    boot, namespace, pid, started = read_own_identity().split(".")
    assert is_process_alive(f"{boot}.{namespace}.{pid}.{int(started) - 1}") is False


def test_the_state_of_an_invalid_or_earlier_boots_identity_is_unknown() -> None:
    boot, namespace, pid, started = read_own_identity().split(".")
    others = (
        f"{OTHER_BOOT}.{namespace}.{pid}.{started}",
        f"{boot}.{int(namespace) - 1}.{pid}.{started}",
        f"{boot}.{namespace}.0.{started}",
        f"{boot}.{namespace}.-1.{started}",
        f"{boot}.{namespace}.{'9' * 30}.{started}",
        f"{boot}.{namespace}.{pid}.",
        f"{boot}.{namespace}.{pid}",
        "",
    )
    assert [is_process_alive(identity) for identity in others] == [None] * len(others)


@pytest.mark.requires("namespaces")
def test_the_state_of_a_process_in_another_namespace_is_unknown() -> None:
    own = read_own_identity()
    with query_identities(own, mounts=[("read", "/", "/"), ("proc", "/proc")]) as (_, (identity, seen)):
        assert identity.split(".")[0] == own.split(".")[0]
        assert identity.split(".")[1] != own.split(".")[1]
        assert seen == "None"
        assert is_process_alive(identity) is None
    assert is_process_alive(identity) is None


@pytest.mark.requires("namespaces")
@pytest.mark.parametrize("mounts", [[("read", "/", "/")], [("read", "/", "/"), ("tmpfs", "/proc")]], ids=str)
def test_a_process_without_a_usable_proc_has_no_identity(mounts: list[Mount]) -> None:
    with query_identities(read_own_identity(), mounts=mounts) as (_, words):
        assert words == ["", "None"]


@pytest.mark.requires("root")
def test_a_process_of_another_user_is_alive() -> None:
    own = read_own_identity()
    code = ASK.replace("print(", f"import os\nos.setuid({ORDINARY_UID})\nprint(")
    with subprocess.Popen(
        [sys.executable, "-c", code, own], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split()[1] == "True"
        process.kill()
