"""The reference: its tables must match the code's signatures, fields, types and commands."""

import inspect
import json
import re
from dataclasses import fields
from typing import Any, get_args

import pytest
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import rlm_batch
from rlm_batch.flows.registry import MODELS
from rlm_batch.sandbox.errors import RlmBatchError
from rlm_batch.sandbox.meta import Meta, QuerySummary

from .pages import ROOT, names, sections, table_rows

SECTIONS = sections("docs/reference.md")
SHARING = tuple(model.flow_name for model in MODELS)  # the flows that "all" means in the table
FLOWS = (*SHARING, "reap")
BLOCKS = ("LocalSandbox", "ContainerSandbox", "DaytonaSandbox", "ModalSandbox", "LanguageModel")
RETRIED = {
    "never": "no",
    "always": "yes",
    "if asked": "with `retry_code_errors`",
    "if idempotent": "with `idempotent`",
}


def format_default(value: Any) -> str:
    """Format a default as in the tables."""
    if value is inspect.Parameter.empty or value is PydanticUndefined:
        return "required"
    return f"`{json.dumps(value) if isinstance(value, str) else repr(value)}`"


def starts_with_description(cell: str, description: str) -> bool:
    """Return True if a cell starts with the code's description; more text may follow."""
    return cell == description or cell.startswith(f"{description} ")


def list_parameters() -> dict[tuple[str, str], tuple[str, str]]:
    """Return the default and description of every flow's parameters, by flow and name."""
    rows: dict[tuple[str, str], tuple[str, str]] = {}
    for flow in FLOWS:
        for parameter in inspect.signature(getattr(rlm_batch, flow).fn).parameters.values():
            (text,) = [item.description for item in get_args(parameter.annotation) if isinstance(item, FieldInfo)]
            assert text is not None
            rows[flow, parameter.name] = (format_default(parameter.default), text)
    return rows


def test_the_table_of_parameters_matches_the_flows() -> None:
    rows = list(table_rows(SECTIONS["Parameters"]))
    documented: dict[tuple[str, str], tuple[str, str]] = {}
    for name, default, flows, text in rows:
        for flow in [*(SHARING if flows.startswith("all") else ()), *names(flows)]:
            assert (flow, name.strip("`")) not in documented, f"{name} of {flow} is there twice"
            documented[flow, name.strip("`")] = (default, text)
    missing = {
        key: f"| `{key[1]}` | {default} | `{key[0]}` | {text} |"
        for key, (default, text) in list_parameters().items()
        if key not in documented
        or documented[key][0] != default
        or not starts_with_description(documented[key][1], text)
    }
    assert missing == {}, "rows that docs/reference.md has to have"
    assert documented.keys() - list_parameters().keys() == set()


@pytest.mark.parametrize("block", BLOCKS)
def test_the_table_of_settings_matches_the_block(block: str) -> None:
    below = re.split(r"^### `?(\w+(?: \w+)*)`?$", SECTIONS["Settings of blocks"], flags=re.MULTILINE)
    tables = dict(zip(below[1::2], below[2::2], strict=True))
    common = {} if block == "LanguageModel" else {name: rest for name, *rest in table_rows(tables["Every provider"])}
    documented = {**common, **{name: rest for name, *rest in table_rows(tables[block])}}
    expected = {
        f"`{name}`": [format_default(field.get_default(call_default_factory=True)), field.description]
        for name, field in getattr(rlm_batch, block).model_fields.items()
    }
    assert documented == expected


def test_the_table_of_errors_lists_every_error_and_its_retry() -> None:
    documented = {names(name)[0]: retried for name, _, retried in table_rows(SECTIONS["Errors"])}
    errors = {
        name: kind
        for name in rlm_batch.__all__
        if isinstance(kind := getattr(rlm_batch, name), type) and issubclass(kind, RlmBatchError)
    }
    assert documented.keys() == errors.keys()
    ends = {"ExecutionsFailed", "SandboxesLeft"}  # errors of a flow, not of an execution
    assert [
        name
        for name, kind in errors.items()
        if name not in ends and not documented[name].startswith(RETRIED[kind.retry_rule])
    ] == []


def test_the_tables_of_results_have_every_field() -> None:
    rows = [row for row in table_rows(SECTIONS["Results"]) if len(row) == 2]
    meta = {name for cell, _ in rows for name in names(cell)} - {*FLOWS}
    assert meta == {field.name for field in fields(Meta)}
    (queries,) = [text for cell, text in rows if cell == "`queries`"]
    assert {*names(queries)} == {field.name for field in fields(QuerySummary)}
    for report in (rlm_batch.SweepReport, rlm_batch.ChunksReport, rlm_batch.RlmAnswer):
        (text,) = [text for _, text in rows if f"`{report.__name__}`" in text]
        assert {*names(text)} - {report.__name__} == {field.name for field in fields(report)}


def test_the_documented_environment_variables_match_the_code() -> None:
    documented = re.findall(r"`(RLM_BATCH_[A-Z_]+)`", SECTIONS["Environment variables"])
    rooms = ("cli", "flows", "tasks", "blocks", "sandbox", "deployments")
    code = "\n".join(path.read_text() for room in rooms for path in (ROOT / room).rglob("*.py"))
    assert {*documented} == {*re.findall(r"\"(RLM_BATCH_[A-Z_]+)\"", code)}


def test_the_table_of_commands_has_every_command() -> None:
    from rlm_batch.cli.commands import app

    rows = [cells[0] for cells in table_rows(SECTIONS["Command line"]) if "`rlm-batch " in cells[0]]
    commands = {name for name in app if not name.startswith("-")}
    assert {names(row)[0].split()[1] for row in rows} == commands
    (row,) = [row for row in rows if "`rlm-batch volume" in row]
    assert {name.split()[-1] for name in names(row)} == {name for name in app["volume"] if not name.startswith("-")}


def test_every_public_name_is_in_the_reference() -> None:
    text = SECTIONS["Names in rlm_batch"] + SECTIONS["Errors"]
    assert [name for name in rlm_batch.__all__ if f"`{name}`" not in text] == []
