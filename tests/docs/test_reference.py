"""The reference: its tables must match the code's errors, environment variables, commands and names."""

import re

import rlm_batch
from rlm_batch.sandbox.errors import RlmBatchError

from .pages import ROOT, names, sections, table_rows

SECTIONS = sections("docs/reference.md")
RETRIED = {
    "never": "no",
    "always": "yes",
    "if asked": "with `retry_code_errors`",
    "if idempotent": "with `idempotent`",
}


def test_the_table_of_errors_lists_every_error_and_its_retry() -> None:
    documented = {name: retried for retried, cell in table_rows(SECTIONS["Errors"]) for name in names(cell)}
    errors = {
        name: kind
        for name in rlm_batch.__all__
        if isinstance(kind := getattr(rlm_batch, name), type)
        and issubclass(kind, RlmBatchError)
        and kind is not RlmBatchError
    }
    assert {*errors} - documented.keys() == set()
    ends = {"ExecutionsFailed", "SandboxesLeft"}  # errors of a flow, not of an execution
    assert [
        name for name, kind in errors.items() if name not in ends and documented[name] != RETRIED[kind.retry_rule]
    ] == []


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
    for group in ("volume", "snapshot"):
        (row,) = [row for row in rows if f"`rlm-batch {group}" in row]
        assert {name.split()[-1] for name in names(row)} == {name for name in app[group] if not name.startswith("-")}


def test_every_public_name_is_in_the_reference() -> None:
    text = SECTIONS[""] + SECTIONS["Errors"]
    assert [name for name in rlm_batch.__all__ if f"`{name}`" not in text] == []


def test_every_public_name_is_in_the_api_reference() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.rst"))
    assert {*rlm_batch.__all__} - {*re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE)} == set()
