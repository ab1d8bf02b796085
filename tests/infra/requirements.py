"""Requirements of tests that a machine may lack.

Tests with a missing requirement are left out, and one skip per requirement reports their number.

A test names its requirements by `@pytest.mark.requires("bubblewrap")`, on itself or on one of its parameters, or by a
fixture in `FIXTURES`.
"""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlm_batch.blocks.local.cgroup import find_parent

from ..standins.mount_namespace import find_refusal
from .isolation_levels import find_missing_support
from .podman.store import find_missing_podman
from .postgres import find_programs

# If the tests run as root, a host that needs an ordinary user runs with this id, which no system assigns. Each worker
# has its own id, because limits, priorities and signals affect all processes of a user.
ORDINARY_UID = 54321 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Fixtures and the requirement of every test that uses one.
FIXTURES = {
    "ui": "chromium",
    "daytona": "namespaces",
    "modal_standin": "namespaces",
    "remote": "namespaces",
    "small_volume": "root",
    "small_disk": "root",
}
# Programs that apt or pip installs and a fresh machine lacks. Tests that need one are marked `programs`. Tests of a
# service are few and have no short form, so they are marked `services` too.
SERVICES = {"chromium", "postgres", "redis", "haproxy", "ray"}
PROGRAMS = {"bubblewrap", "bubblewrap for users", "podman", *SERVICES}


def _find_missing_program(*names: str, package: str, purpose: str) -> str:
    return "" if any(map(shutil.which, names)) else f"there is no {names[0]} here ({purpose}): install {package}"


def _find_missing_controller(name: str) -> str:
    return "" if name in find_parent().controllers else f"there are no control groups with the {name} controller here"


def _find_missing_pip() -> str:
    """Return a message if the base Python, which the stand-in's sandboxes use, has no pip; empty otherwise."""
    own = Path(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))
    library = own.parents[1] / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    return "" if (library / "pip").is_dir() else f"{own} has no pip of its own, which Daytona's sandboxes have"


def _find_missing_index() -> str:
    """Return a message if pip reaches no index of packages; empty otherwise."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--quiet", "scikit-learn"]
    found = subprocess.run(command, capture_output=True, check=False).returncode == 0
    return "" if found else "pip reaches no package index here: set PIP_INDEX_URL"


def _find_missing_user_level(level: str) -> str:
    return find_missing_support(level, os.getuid() or ORDINARY_UID)


# Requirements and functions that return what this machine lacks for them, in words; empty if nothing.
REQUIREMENTS: dict[str, Callable[[], str]] = {
    "linux": lambda: "" if sys.platform == "linux" else "machines of their own are Linux's",
    "root": lambda: "" if os.getuid() == 0 else "the tests run as an ordinary user, and these need root",
    "bubblewrap": lambda: find_missing_support("bubblewrap"),
    "landlock": lambda: find_missing_support("landlock"),
    "isolation": lambda: find_missing_support("auto"),
    "bubblewrap for users": lambda: _find_missing_user_level("bubblewrap"),
    "landlock for users": lambda: _find_missing_user_level("landlock"),
    "namespaces": lambda: f"no namespaces for the stand-ins: {why}" if (why := find_refusal()) else "",
    "podman": find_missing_podman,
    "chromium": lambda: _find_missing_program(
        *BROWSERS, package="chromium", purpose="Prefect's UI is looked at in a browser"
    ),
    "postgres": lambda: (
        "" if find_programs() else "there is no initdb here (limits and `up` on Postgres): install postgresql"
    ),
    "redis": lambda: _find_missing_program(
        "redis-server", package="redis-server", purpose="several API servers need it"
    ),
    "ray": lambda: (
        "" if importlib.util.find_spec("prefect_ray") else "there is no Ray here: pip install -e '.[ray]', 283 MB"
    ),
    "gcc": lambda: _find_missing_program("gcc", package="gcc", purpose="a fork bomb that is fast enough"),
    "pip": _find_missing_pip,
    "index": _find_missing_index,
    "memory groups": lambda: _find_missing_controller("memory"),
    "cpu groups": lambda: _find_missing_controller("cpu"),
    "freezer": lambda: (
        "" if os.access("/sys/fs/cgroup/freezer", os.W_OK) else "no process can be made one that no signal ends here"
    ),
    "haproxy": lambda: _find_missing_program("haproxy", package="haproxy", purpose="the balancer of compose.yaml"),
}


def mark_level(level: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a test parameter that is an isolation level."""
    return () if level == "none" else (pytest.mark.requires(level),)


def mark_programs(item: pytest.Item) -> None:
    """Mark a test that needs an installed program, so that `make test-programs` selects it."""
    requirements = list_requirements(item)
    if PROGRAMS.intersection(requirements):
        item.add_marker(pytest.mark.programs)
    if SERVICES.intersection(requirements):
        item.add_marker(pytest.mark.services)


def list_requirements(item: pytest.Item) -> list[str]:
    """List the requirements of a test, by its marks and its fixtures."""
    names = [name for mark in item.iter_markers("requires") for name in mark.args]
    return names + [need for fixture, need in FIXTURES.items() if fixture in getattr(item, "fixturenames", ())]


def leave_out_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove tests with a missing requirement from `items`, except one per requirement, whose skip reports it."""
    find_missing = functools.cache(lambda name: REQUIREMENTS[name]())
    left_out: dict[str, list[pytest.Item]] = {}
    for item in items:
        lacks = next(filter(find_missing, list_requirements(item)), None)
        if lacks is not None:
            left_out.setdefault(lacks, []).append(item)
    for name, tests in left_out.items():
        tests[0].add_marker(pytest.mark.skip(reason=f"{len(tests)} tests: {find_missing(name)}"))
    deselected = [item for tests in left_out.values() for item in tests[1:]]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        gone = set(deselected)
        items[:] = [item for item in items if item not in gone]
