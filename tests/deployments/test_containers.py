"""The container files: they name existing files, settings and commands of the package and Prefect. No engine runs."""

import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlm_batch.flows.server.process import SERVER_SETTINGS

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
DOCKERFILE = re.sub(r"\\\n", " ", (ROOT / "deployments" / "Dockerfile").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deployments" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"] == COMPOSE["x-image"]["image"]}


def list_instructions(name: str) -> list[list[str]]:
    return [line.split()[1:] for line in DOCKERFILE.splitlines() if line.startswith(f"{name} ")]


def in_image() -> dict[str, str]:
    return dict(word.split("=", 1) for words in list_instructions("ENV") for word in words)


def list_environments() -> Iterator[tuple[str, dict[str, str | None]]]:
    yield "Dockerfile", in_image()  # type: ignore[misc]
    for name, service in OURS.items():
        yield name, service.get("environment", {})


@pytest.fixture(scope="module")
def settings() -> set[str]:
    """Return the names of all settings of Prefect and its Redis integration, as environment variables."""
    from prefect.settings import Settings
    from prefect.settings.legacy import _get_valid_setting_names
    from prefect_redis.cleanup_queue import RedisWorkerCleanupQueueSettings
    from prefect_redis.client import RedisMessagingSettings

    redis = {
        f"{kind.model_config.get('env_prefix', '')}{name}".upper()
        for kind in (RedisMessagingSettings, RedisWorkerCleanupQueueSettings)
        for name in kind.model_fields
    }
    # Prefect reads these without declaring them.
    encryption = importlib.import_module("prefect.server.utilities.encryption")
    read = set(re.findall(r'"(PREFECT_\w+)"', Path(str(encryption.__file__)).read_text()))
    return set(_get_valid_setting_names(Settings)) | redis | read


def test_the_image_has_every_package_and_build_file() -> None:
    *files, _ = list_instructions("COPY")[0]
    rooms = {source for source, target in list_instructions("COPY")[1:] if source == target}
    packages = PYPROJECT["tool"]["setuptools"]["packages"]
    assert rooms == {name.split(".")[1] for name in packages if "." in name}
    assert {"pyproject.toml", "constraints.txt", "__init__.py", PROJECT["readme"], *PROJECT["license-files"]} <= {
        *files
    }
    assert {"py.typed"} == set(PYPROJECT["tool"]["setuptools"]["package-data"]["rlm_batch"]) <= {*files}
    assert [name for name in (*files, *rooms) if not (ROOT / name).exists()] == []
    (extras,) = re.findall(r"'\.\[([a-z,]+)\]'", DOCKERFILE)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    build = COMPOSE["x-image"]["build"]
    assert (ROOT / "deployments" / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_every_command_exists() -> None:
    from prefect.cli._app import _app as prefect

    from rlm_batch.cli.commands import app

    ((*words,),) = list_instructions("CMD")
    commands = [[word.strip('[],"') for word in words], *(service["command"] for service in OURS.values())]
    apps = {"prefect": prefect, "rlm-batch": app}
    assert set(apps) - {"prefect"} <= set(PROJECT["scripts"])
    for name, *arguments in commands:
        apps[name].parse_args(arguments, exit_on_error=False, print_error=False)


def test_every_setting_exists(settings: set[str]) -> None:
    source = "".join(path.read_text() for room in ("blocks", "tasks") for path in (ROOT / room).rglob("*.py"))
    unknown = [
        f"{where}: {name}"
        for where, environment in list_environments()
        for name in environment
        if name not in settings
        and not (name.startswith(("RLM_BATCH_", "XDG_")) and f'"{name}"' in source)
        and name not in ("DO_NOT_TRACK", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "OPENAI_API_KEY")
        and name not in {"DAYTONA_API_KEY", "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"}
    ]
    assert unknown == []
    assert "PREFECT_NO_SUCH_SETTING" not in settings


def test_the_compose_file_has_no_secret_and_requires_the_password() -> None:
    passwords: set[str | None] = set()
    for name, environment in list_environments():
        for setting, value in environment.items():
            if re.search("KEY|TOKEN|SECRET|PASSWORD|AUTH_STRING", setting):
                assert value is None or re.fullmatch(r"\$\{[^}]+\}", value), (name, setting)
            if setting in ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"):
                passwords.add(value)
    (password,) = passwords  # One variable sets it for servers and clients.
    assert str(password).startswith("${PREFECT_API_AUTH_STRING:?")
    assert "PREFECT_SERVER_API_AUTH_STRING" in SERVICES["server"]["environment"]
    for name in ("deploy", "worker"):
        assert "PREFECT_API_AUTH_STRING" in SERVICES[name]["environment"]


def test_the_server_has_our_settings() -> None:
    ours = {name: value for name, value in SERVER_SETTINGS.items() if name.startswith("PREFECT_SERVER_")}
    elsewhere = {"PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"}
    for name in ("server", "services", "migrate"):
        environment = SERVICES[name]["environment"]
        assert {name: environment.get(name) for name in ours if name not in elsewhere} == {
            name: value for name, value in ours.items() if name not in elsewhere
        }


def test_workers_and_deployments_use_the_same_pool() -> None:
    from rlm_batch.deployments.deploy import WORK_POOL, load_entries

    command = SERVICES["worker"]["command"]
    pools = {entry["work_pool"]["name"] for entry in load_entries()}
    assert pools == {WORK_POOL}
    assert command[:2] == ["rlm-batch", "worker"]
    assert "--pool" not in command  # The default is this pool.
