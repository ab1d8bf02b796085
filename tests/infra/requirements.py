"""What tests need and a machine may not have: the tests that lack one are left out, and told by one skip for each.

A test names what it needs by `@pytest.mark.requires("bubblewrap")`, on itself or on one of its parameters, or by a
fixture that is in `FIXTURES`.
"""

import functools
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlm_batch.blocks.local.totals.cgroups import find_parents

from ..standins.mount_namespace import find_refusal
from .isolation_levels import find_missing_support
from .podman.store import find_missing_podman
from .postgres import find_programs

# Whom a host is run as that is an ordinary user although the tests run as root: a user whom no system hands out, and
# another one for each worker, for a user's limits, priorities and signals reach all of that user's processes.
ORDINARY_UID = 54321 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Fixtures, and what every test that asks for one needs.
FIXTURES = {
    "ui": "chromium",
    "modal_sandbox": "namespaces",
    "remote": "namespaces",
    "small_volume": "root",
    "small_disk": "root",
}
# What apt or pip installs and a fresh machine lacks. The tests that need one of these are marked `programs`, and those
# of a service are few and have no short form: they are marked `services` too.
SERVICES = {"chromium", "postgres", "redis", "haproxy", "ray"}
PROGRAMS = {"bubblewrap", "bubblewrap for users", "podman", *SERVICES}


def _find_missing_program(*names: str, package: str, purpose: str) -> str:
    return "" if any(map(shutil.which, names)) else f"there is no {names[0]} here ({purpose}): install {package}"


def _find_missing_controller(name: str) -> str:
    return "" if name in find_parents() else f"there are no control groups with the {name} controller here"


def _find_missing_pip() -> str:
    """The stand-in's sandboxes have the Python below ours."""
    own = Path(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))
    library = own.parents[1] / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    return "" if (library / "pip").is_dir() else f"{own} has no pip of its own, which Daytona's sandboxes have"


def _find_missing_user_level(level: str) -> str:
    return find_missing_support(level, os.getuid() or ORDINARY_UID)


# What can be needed, and what says in words what this machine lacks for it: empty where it has it.
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
    "memory groups": lambda: _find_missing_controller("memory"),
    "cpu groups": lambda: _find_missing_controller("cpu"),
    "freezer": lambda: (
        "" if os.access("/sys/fs/cgroup/freezer", os.W_OK) else "no process can be made one that no signal ends here"
    ),
    "haproxy": lambda: _find_missing_program("haproxy", package="haproxy", purpose="the balancer of compose.yaml"),
}


def mark_level(level: str) -> tuple[pytest.MarkDecorator, ...]:
    """The marks of a parameter that is a level of isolation."""
    return () if level == "none" else (pytest.mark.requires(level),)


def mark_programs(item: pytest.Item) -> None:
    """Mark a test that needs an installed program, so that `make test-programs` selects it."""
    requirements = list_requirements(item)
    if PROGRAMS.intersection(requirements):
        item.add_marker(pytest.mark.programs)
    if SERVICES.intersection(requirements):
        item.add_marker(pytest.mark.services)


def list_requirements(item: pytest.Item) -> list[str]:
    """What that test needs, by its marks and its fixtures."""
    names = [name for mark in item.iter_markers("requires") for name in mark.args]
    return names + [need for fixture, need in FIXTURES.items() if fixture in getattr(item, "fixturenames", ())]


def leave_out_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes from `items` the tests that lack something, but one for each thing, which is skipped and says so."""
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
