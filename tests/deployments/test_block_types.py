"""Our block types beside another package's on one server, and blocks that version 1.0 saved."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
from prefect.blocks.core import Block
from prefect.logging import get_logger

from rlm_batch import ConfigurationError, DaytonaCredentials, DaytonaSandbox, LanguageModel, LocalSandbox, batch
from rlm_batch.blocks import block_types
from rlm_batch.blocks.language_model.model_access import resolve_language_model
from rlm_batch.blocks.registry import resolve_provider
from rlm_batch.deployments.deploy import deploy

from .conftest import ask

pytestmark = pytest.mark.usefixtures("server")


class ForeignSandbox(Block):
    """A block of another package, with a slug of version 1.0."""

    _block_type_name: ClassVar[str] = "Container Sandbox"  # type: ignore[misc]
    _block_type_slug: ClassVar[str] = "container-sandbox"  # type: ignore[misc]
    _description: ClassVar[str] = "Boxes of sand."  # type: ignore[misc]
    image: str  # Ours has a field of that name, too.


def read_type(slug: str) -> bytes:
    """Return a block type as the server sends it."""
    return ask(lambda client: client.request("GET", "/block_types/slug/{slug}", path_params={"slug": slug})).content


@contextmanager
def slugs_of_version_1() -> Iterator[None]:
    """Give our block types the names of version 1.0, and so its slugs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in block_types.__all__:
            block = getattr(block_types, name)
            patch.setattr(block, "_block_type_name", block.get_block_type_name().removeprefix("RLM "))
        yield


def test_deploy_leaves_another_packages_types_as_they_are() -> None:
    ForeignSandbox(image="theirs").save("theirs", overwrite=True)
    before = read_type("container-sandbox")
    asyncio.run(deploy())
    assert read_type("container-sandbox") == before
    assert b"Boxes of sand." in before
    types = ask(lambda client: client.read_block_types())
    ours = {block_type.slug: block_type.name for block_type in types if block_type.slug.startswith("rlm-")}
    assert set(ours) == {getattr(block_types, name).get_block_type_slug() for name in block_types.__all__}
    assert all(name.startswith("RLM ") for name in ours.values())
    for slug in ("container-sandbox", "rlm-container-sandbox"):
        with pytest.raises(ConfigurationError, match="and container-sandbox/theirs is another package's block: save"):
            asyncio.run(resolve_provider(f"{slug}/theirs"))


@pytest.mark.parametrize("common", ["_block_type_slug", "_block_type_name"])
def test_deploy_and_save_refuse_another_packages_type_with_a_slug_or_a_name_of_ours(
    common: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slug = f"another-packages{common.replace('_', '-')}"
    monkeypatch.setattr(ForeignSandbox, "_block_type_slug", slug)
    monkeypatch.setattr(ForeignSandbox, "_block_type_name", f"Another package's {common}")
    monkeypatch.setattr(LocalSandbox, common, getattr(ForeignSandbox, common))
    ForeignSandbox.register_type_and_schema()
    before = read_type(slug)
    for register in (lambda: asyncio.run(deploy()), lambda: LocalSandbox().save("mine")):
        with pytest.raises(ConfigurationError, match=f"the block type {slug} .* stays as it is: use another server"):
            register()
    assert read_type(slug) == before


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Yield the log of `rlm_batch`, which a script's terminal shows."""
    get_logger("rlm_batch").addHandler(caplog.handler)
    yield caplog
    get_logger("rlm_batch").removeHandler(caplog.handler)


def test_blocks_of_version_1_are_read_and_can_be_moved(warnings: pytest.LogCaptureFixture) -> None:
    with slugs_of_version_1():
        LocalSandbox(isolation="none", environment={"STAGE": "old"}).save("of-version-1", overwrite=True)  # type: ignore[arg-type]
        account = DaytonaCredentials(api_key="key")  # type: ignore[arg-type]
        account.save("of-version-1", overwrite=True)
        DaytonaSandbox(credentials=account).save("of-version-1", overwrite=True)
        LanguageModel(model="openai/old").save("of-version-1", overwrite=True)
    code = "import os\nSUBMIT(stage=os.environ['STAGE'])"
    for provider in ("local-sandbox/of-version-1", LocalSandbox.load("of-version-1")):
        assert batch.sync([code], provider=provider)[0].stage == "old"
    assert asyncio.run(resolve_language_model("language-model/of-version-1")).model == "openai/old"
    sandbox = DaytonaSandbox.load("of-version-1")
    assert sandbox.credentials is not None
    assert sandbox.credentials.api_key is not None
    assert sandbox.credentials.api_key.get_secret_value() == "key"
    advice = "the block local-sandbox/of-version-1 is of an earlier version: LocalSandbox.load('of-version-1')"
    assert advice in warnings.text
    LocalSandbox.load("of-version-1").save("of-version-1")
    warnings.clear()
    for slug in ("rlm-local-sandbox", "local-sandbox"):
        assert asyncio.run(resolve_provider(f"{slug}/of-version-1")).environment
    assert warnings.text == ""
