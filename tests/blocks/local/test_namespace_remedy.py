"""Machines with bubblewrap but without namespaces. The error names the cause and the setting to change."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlm_batch.blocks.local.isolation_level import find_namespace_remedy

UID_MAP = "bwrap: setting up uid map: Permission denied"

# The script runs in a user namespace, which has its own copy of this setting. It runs the program as an ordinary user,
# without the shell's capabilities.
FOLLOW_THE_REMEDY = """
try_level() { setpriv --ambient-caps=-all --inh-caps=-all "$@"; }
echo 0 > /proc/sys/user/max_user_namespaces
try_level "$@"
echo 10000 > /proc/sys/user/max_user_namespaces
try_level "$@"
"""
CHECK = """
import asyncio
from rlm_batch import ConfigurationError, LocalSandbox
try:
    print(asyncio.run(LocalSandbox(isolation="bubblewrap").check()))
except ConfigurationError as error:
    print(error)
"""


@pytest.mark.requires("bubblewrap")
def test_the_error_names_the_kernel_setting_that_forbids_namespaces(tmp_path: Path) -> None:
    words = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "--keep-caps"]
    unshare = subprocess.run([*words, "true"], capture_output=True, check=False)
    if unshare.returncode:
        pytest.skip(f"no user namespace for the test: {unshare.stderr.decode()}")
    command = [*words, "sh", "-c", FOLLOW_THE_REMEDY, "sh", sys.executable, "-c", CHECK]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    refused, allowed = done.stdout.splitlines()
    assert "its first sandbox failed: the driver did not start" in refused
    assert "user.max_user_namespaces is 0 here, which forbids namespaces: sudo sysctl -w user.max_user" in refused
    assert "install bubblewrap" not in refused
    assert allowed.startswith("bubblewrap (namespaces")


@pytest.mark.parametrize(
    ("name", "value", "failure", "remedy"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns", "1", UID_MAP, "load the AppArmor profile for bwrap"),
        ("kernel/unprivileged_userns_clone", "0", UID_MAP, "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "0", UID_MAP, "may not create user namespaces|is a container"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "its image is broken", "^$"),
    ],
)
def test_a_failed_namespace_suggests_the_kernel_setting_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, failure: str, remedy: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(f"{value}\n")
    suggestion = find_namespace_remedy(failure, tmp_path)
    assert re.search(remedy, suggestion), suggestion
