"""Standards for Prefect block forms: every field has an explanation and an example, and secrets are hidden."""

import asyncio
import re
import typing
from importlib.metadata import version
from typing import Any, ClassVar

import pytest
from prefect.blocks.abstract import JobBlock
from prefect.blocks.core import Block
from prefect.testing.standard_test_suites.blocks import BlockStandardTestSuite
from pydantic import SecretStr

from rlm_batch import (
    CodeError,
    ContainerSandbox,
    DaytonaCredentials,
    DaytonaSandbox,
    LanguageModel,
    LocalSandbox,
    ModalCredentials,
    ModalSandbox,
    blocks,
)

SANDBOXES: list[type[Block]] = [LocalSandbox, ContainerSandbox, DaytonaSandbox, ModalSandbox]
OURS: list[type[Block]] = [*SANDBOXES, LanguageModel, DaytonaCredentials, ModalCredentials]


class TestEveryBlock(BlockStandardTestSuite):
    # The suite's test fetches a logo over the network, and an offline UI could not show the logo. A data: URL does not
    # work: Prefect's server and UI accept it, but then Prefect's clients can no longer read the block type.
    test_has_a_valid_image: ClassVar[None] = None  # type: ignore[assignment]

    @pytest.fixture(params=OURS, ids=lambda block: block.__name__)
    def block(self, request: pytest.FixtureRequest) -> type[Block]:
        return request.param

    def test_a_block_has_no_remote_logo(self, block: type[Block]) -> None:
        assert block._logo_url is None

    def test_every_field_has_a_unique_title_and_secret_fields_are_hidden(self, block: type[Block]) -> None:
        schema = block.model_json_schema()
        titles = [field["title"] for field in schema["properties"].values()]
        assert len(set(titles)) == len(titles)
        hidden = {path.removesuffix(".*") for path in schema["secret_fields"] if not path.startswith("credentials.")}
        secret = {
            name
            for name, field in block.model_fields.items()
            if field.annotation is SecretStr or SecretStr in _parts(field.annotation)
        }
        assert hidden == secret
        telling = [name for name in block.model_fields if re.search("(_key|(?<!per)_token|_secret)$", name)]
        assert set(telling) <= hidden

    def test_a_blocks_page_shows_the_install_command_an_example_and_a_version(self, block: type[Block]) -> None:
        example = block.get_code_example() or ""
        assert "install" in f"{block.get_description()} {example}"
        program = example.partition("```python\n")[2].partition("```")[0]
        assert "batch.sync(" in program
        compile(program, block.__name__, "exec")
        assert block.get_block_schema_version() == version("rlm-batch")


def test_a_providers_form_begins_with_its_account() -> None:
    first = {kind: next(iter(kind.model_json_schema()["properties"])) for kind in OURS}
    assert (first[DaytonaSandbox], first[ModalSandbox]) == ("credentials", "credentials")


def test_a_block_runs_code_and_opens_interpreters() -> None:
    block = LocalSandbox(memory_mib=512)
    assert block.run("SUBMIT(y=double(x))", {"x": 2}, tools={"double": lambda n: 2 * n}).y == 4

    async def execute() -> int:
        async with block.interpreter() as interpreter:
            return (await interpreter.execute("SUBMIT(y=2 * x)", {"x": 3})).y

    assert asyncio.run(execute()) == 6


def test_a_block_has_the_methods_of_prefects_jobs() -> None:
    block = LocalSandbox()
    assert isinstance(block, JobBlock)
    run = block.trigger("SUBMIT(y=2 * x)", {"x": 2}, timeout=60)
    run.wait_for_completion()
    assert run.fetch_result().y == 4
    failed = block.trigger("1 / 0")
    with pytest.raises(CodeError, match="ZeroDivisionError"):
        failed.wait_for_completion()

    async def execute() -> int:
        job: Any = block
        run = await job.trigger("SUBMIT(y=x)", {"x": 3})
        await run.wait_for_completion(60)
        return (await run.fetch_result()).y

    assert asyncio.run(execute()) == 3


def test_these_tests_cover_every_registered_block() -> None:
    assert {getattr(blocks, name) for name in blocks.__all__} == set(OURS)


def _parts(annotation: object) -> set[object]:
    annotations = set(typing.get_args(annotation))
    return annotations.union(*(_parts(part) for part in annotations)) if annotations else annotations
