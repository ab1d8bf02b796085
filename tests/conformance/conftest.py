"""Fixtures that run the same tests on every provider of `blocks/registry.py`.

For a new provider, add to `MAKERS` a function that creates it with its stand-in.
"""

import os
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import ContainerSandbox, DaytonaSandbox, LocalSandbox, ModalSandbox
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.blocks.registry import PROVIDERS
from rlm_batch.sandbox.interpreter import Interpreter

from ..infra.isolation_levels import find_strongest_level
from ..infra.requirements import mark_level
from ..infra.waiting import HANG_SECONDS

PROVIDER_NAMES = [
    name
    for entry in PROVIDERS.values()
    for name in ([f"local-{level}" for level in reversed(entry.kinds)] if entry.name == "local" else [entry.name])
]
# `make test` uses the strongest level of this machine. Code behaves the same on weaker levels, so their tests are
# `full`.
LEVELS = ("bubblewrap", "landlock", "none")
LATER = [f"local-{level}" for level in LEVELS[LEVELS.index(find_strongest_level() or "none") + 1 :]]
LITTLE_MEMORY = 256  # MiB
# A container takes a hundred times as long to start as a local sandbox, so all container tests except these are `full`.
QUICK_IN_CONTAINERS = (
    "test_fields_come_back_as_items_and_attributes",
    "test_a_file_saved_in_one_sandbox_is_loaded_in_the_next",
)


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "local_first: the host and the driver do this without the provider, so on a cloud the test is full",
        "every_provider: among tests that are local_first, one that is never full",
    ):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(tryfirst=True)  # this runs before pytest selects tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = str(item.callspec.params.get("provider_name", "local")) if hasattr(item, "callspec") else "local"  # type: ignore[attr-defined]
        if name.startswith("local"):
            continue
        if name == "container":
            if getattr(item, "originalname", "") not in QUICK_IN_CONTAINERS:
                item.add_marker(pytest.mark.full)
            continue
        item.add_marker(pytest.mark.requires("namespaces"))
        if item.get_closest_marker("local_first") and not item.get_closest_marker("every_provider"):
            item.add_marker(pytest.mark.full)


def make_local(name: str, memory_mib: int, request: pytest.FixtureRequest) -> SandboxProvider:
    isolation = name.removeprefix("local-")
    more: dict[str, Any] = {}
    if os.geteuid() != 0:
        more["processes"] = 1024  # `landlock` counts the user's other processes too
    return LocalSandbox(isolation=isolation, memory_mib=memory_mib, **more)  # type: ignore[arg-type]


def make_daytona(_name: str, memory_mib: int, request: pytest.FixtureRequest) -> SandboxProvider:
    request.getfixturevalue("daytona")
    return DaytonaSandbox(image="python:3.12", memory=-(-memory_mib // 1024))  # whole GiB, with an image only


def make_modal(_name: str, memory_mib: int, request: pytest.FixtureRequest) -> SandboxProvider:
    hello = request.getfixturevalue("modal_standin").hello
    return ModalSandbox(token_id=hello["token_id"], token_secret=hello["token_secret"], memory_mib=memory_mib)


def make_container(_name: str, memory_mib: int, request: pytest.FixtureRequest) -> SandboxProvider:
    request.getfixturevalue("no_container_left")
    return ContainerSandbox(engine="podman", memory_mib=memory_mib)


MAKERS = {"local": make_local, "container": make_container, "daytona": make_daytona, "modal": make_modal}


def make(name: str, memory_mib: int, request: pytest.FixtureRequest) -> SandboxProvider:
    """Return the provider of that name, whose sandboxes have at least that much memory and not much more."""
    kind = name.partition("-")[0]
    assert kind in MAKERS, f"add to MAKERS in tests/conformance/conftest.py what makes {kind} with its stand-in"
    return MAKERS[kind](name, memory_mib, request)


def mark_provider(name: str) -> list[pytest.MarkDecorator]:
    """Return the marks of that provider's tests: their requirement, and `full` where it applies."""
    if name == "container":
        return [pytest.mark.requires("podman")]
    level = name.partition("-")[2]
    return [*(mark_level(level) if level else ()), *([pytest.mark.full] if name in LATER else [])]


@pytest.fixture(params=[pytest.param(name, marks=mark_provider(name)) for name in PROVIDER_NAMES])
def provider_name(request: pytest.FixtureRequest, running_daytona: object) -> str:
    return str(request.param)


@pytest.fixture
def provider(provider_name: str, request: pytest.FixtureRequest) -> SandboxProvider:
    """Return the parametrized provider with its usual settings."""
    return make(provider_name, 4096, request)


@pytest.fixture
def small_provider(provider_name: str, request: pytest.FixtureRequest) -> SandboxProvider:
    """Return the parametrized provider with little memory."""
    return make(provider_name, LITTLE_MEMORY, request)


@pytest.fixture
def volume_name(volumes: Path) -> str:
    """Return the name of a new volume for the test."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def interpreter(provider: SandboxProvider) -> AsyncIterator[Interpreter]:
    """Yield an interpreter in an open sandbox."""
    async with provider.interpreter(timeout=HANG_SECONDS) as interpreter:
        yield interpreter


@pytest.fixture(autouse=True)
def clean(no_process_left: None) -> None:
    """Fail each test here that leaves a process."""
