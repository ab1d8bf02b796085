"""Blocks that were saved on a Prefect server by an earlier version load, and are registered as they were."""

import json
import uuid
from typing import Any

import pytest
from prefect import get_client
from prefect.blocks.core import Block
from prefect.client.schemas.actions import BlockDocumentCreate, BlockSchemaCreate, BlockTypeCreate
from prefect.exceptions import ObjectNotFound
from pydantic import SecretStr

import rlm_batch

from .conftest import FIXTURES

pytestmark = pytest.mark.anyio


@pytest.fixture(params=sorted(path.stem for path in (FIXTURES / "blocks").glob("*.json")))
def saved(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each type of block, with its schema and documents of then."""
    return json.loads((FIXTURES / "blocks" / f"{request.param}.json").read_text())


@pytest.fixture
def kind(saved: dict[str, Any]) -> type[Block]:
    """Its class of today."""
    return getattr(rlm_batch, saved["class"])


async def save(saved: dict[str, Any], document: dict[str, Any]) -> str:
    """Brings a document of then to the server, in the way that the code of then did; returns its name there."""
    name = f"{document['name']}-{uuid.uuid4().hex[:8]}"
    async with get_client() as client:
        try:
            block_type = await client.read_block_type_by_slug(saved["block_type"]["slug"])
        except ObjectNotFound:
            block_type = await client.create_block_type(BlockTypeCreate(**saved["block_type"]))
        written = {key: saved["block_schema"][key] for key in ("fields", "capabilities", "version")}
        schema = await client.create_block_schema(BlockSchemaCreate(block_type_id=block_type.id, **written))
        assert schema.checksum == saved["block_schema"]["checksum"]
        await client.create_block_document(
            BlockDocumentCreate(
                name=name, data=document["data"], block_schema_id=schema.id, block_type_id=block_type.id
            )
        )
    return name


def plain(value: Any) -> Any:
    """The value with its secrets in clear."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return {name: plain(item) for name, item in value.items()} if isinstance(value, dict) else value


async def test_a_document_of_then_loads_with_every_value(server: str, saved: dict[str, Any], kind: type[Block]) -> None:
    for document in saved["documents"]:
        name = await save(saved, document)
        for block in (await kind.aload(name), await Block.aload(f"{saved['block_type']['slug']}/{name}")):
            assert type(block) is kind
            assert {field: plain(getattr(block, field)) for field in document["data"]} == document["data"]


def test_its_type_is_registered_as_it_was(saved: dict[str, Any], kind: type[Block]) -> None:
    assert kind.get_block_type_slug() == saved["block_type"]["slug"]
    assert kind.get_block_type_name() == saved["block_type"]["name"]
    assert sorted(kind.get_block_capabilities()) == sorted(saved["block_schema"]["capabilities"])


def test_its_schema_has_the_fields_that_it_had_and_no_other_checksum_unless_there_are_more(
    saved: dict[str, Any], kind: type[Block]
) -> None:
    fields: dict[str, Any] = saved["block_schema"]["fields"]
    schema = kind.model_json_schema()
    for name, field in fields["properties"].items():
        found = schema["properties"][name]
        about = ("title", "description", "position")
        assert {key: value for key, value in found.items() if key not in about} == {
            key: value for key, value in field.items() if key not in about
        }
    assert set(fields["secret_fields"]) <= set(schema["secret_fields"])
    if set(schema["properties"]) == set(fields["properties"]):
        assert kind._calculate_schema_checksum() == saved["block_schema"]["checksum"]
