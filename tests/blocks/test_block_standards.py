"""What a person finds in a block's form: every field explained, secrets hidden, an example, where to read on."""

import re
import typing
from typing import ClassVar

import pytest
from prefect.blocks.core import Block
from prefect.testing.standard_test_suites.blocks import BlockStandardTestSuite
from pydantic import SecretStr

from rlm_batch import DaytonaSandbox, LanguageModel, LocalSandbox, ModalSandbox
from rlm_batch.blocks import collection

OURS: list[type[Block]] = [LocalSandbox, DaytonaSandbox, ModalSandbox, LanguageModel]


class TestEveryBlock(BlockStandardTestSuite):
    # No logo would reach the UI offline, and the suite's own test would fetch it over the network.
    test_has_a_valid_image: ClassVar[None] = None  # type: ignore[assignment]

    @pytest.fixture(params=OURS, ids=lambda block: block.__name__)
    def block(self, request: pytest.FixtureRequest) -> type[Block]:
        return request.param

    def test_it_has_no_logo_that_would_be_fetched_from_somewhere(self, block: type[Block]) -> None:
        assert block._logo_url is None

    def test_every_field_has_a_title_of_its_own_and_the_secret_ones_are_hidden(self, block: type[Block]) -> None:
        schema = block.model_json_schema()
        titles = [field["title"] for field in schema["properties"].values()]
        assert len(set(titles)) == len(titles)
        hidden = {path.removesuffix(".*") for path in schema["secret_fields"]}
        secret = {
            name
            for name, field in block.model_fields.items()
            if field.annotation is SecretStr or SecretStr in _parts(field.annotation)
        }
        assert hidden == secret
        telling = [name for name in block.model_fields if re.search("(_key|(?<!per)_token|_secret)$", name)]
        assert set(telling) <= hidden


def test_no_block_that_prefect_registers_is_left_out_here() -> None:
    assert {getattr(collection, name) for name in collection.__all__} == set(OURS)


def _parts(annotation: object) -> set[object]:
    found = set(typing.get_args(annotation))
    return found.union(*(_parts(part) for part in found)) if found else found
