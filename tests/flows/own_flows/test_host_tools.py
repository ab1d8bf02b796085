"""Host tools: functions of the host that a flow's code calls."""

import asyncio
import datetime
import functools
import math
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas
import polars
import pytest
from prefect.utilities.callables import parameter_schema
from pydantic import BaseModel

from rlm_batch import ConfigurationError, batch, load_report, open_rlm, rlm, sequence
from rlm_batch.sandbox.outcomes.outcome_json import outcome_to_json
from rlm_batch.tasks import host_tools

from ...infra.deployed import Deployed
from ...infra.scripted_turns import format_turn
from ...standins.openai_chat import ChatServer

pytestmark = pytest.mark.anyio

NAME = "openai/gpt-4o-mini"


async def look_up(city: str, *, scale: int = 1) -> dict[str, int]:
    await asyncio.sleep(0)
    return {"people": 265_000 * scale, "process": os.getpid()}


def count(city: str) -> Any:
    found = look_up(city, scale=2)  # type: ignore[name-defined]  # noqa: F821
    return {**found, "size": get_size("/")}  # type: ignore[name-defined]  # noqa: F821


def divide(number: float, *, by: float = 1) -> float:
    """Divide a number."""
    return number / by


look_up_on_host = look_up
del look_up


async def test_code_calls_host_tools_and_the_calls_are_counted(tmp_path: Path):
    ledger = tmp_path / "ledger"
    tools = {"look_up": look_up_on_host, "get_size": "os.path:basename"}
    inputs = [{"city": "Ghent"}, {"city": "Bruges"}]
    first = await batch(count, inputs, tools=tools, results_path=ledger)
    assert [result.outputs for result in first] == [{"people": 530_000, "process": os.getpid(), "size": ""}] * 2
    assert {tuple(result.meta.tool_calls.items()) for result in first} == {(("look_up", 1), ("get_size", 1))}
    kept = load_report(str(ledger))
    assert [outcome.meta.tool_calls for outcome in kept.results] == [{"look_up": 1, "get_size": 1}] * 2
    again = await batch(count, inputs, tools=tools, results_path=ledger)
    assert [result.meta.sandbox_id for result in again] == [result.meta.sandbox_id for result in first]
    steps = await sequence(["x = look_up('Ghent')", "SUBMIT(x['people'])"], tools={"look_up": look_up_on_host})
    assert (steps[1].output, steps[0].meta.tool_calls, steps[1].meta.tool_calls) == (265_000, {"look_up": 1}, {})
    assert "tool_calls" not in outcome_to_json(steps[1])["meta"]


async def test_a_tool_timeout_raises_in_the_code():
    code = "try:\n    wait()\nexcept TimeoutError as error:\n    SUBMIT(str(error))"
    (result,) = await batch([code], tools={"wait": asyncio.Event().wait}, tool_timeout=0.1)
    assert result.output == "wait took more than 0.1 s: ask it for less"


async def test_a_tool_without_a_limit_may_ask_a_person(monkeypatch: pytest.MonkeyPatch):
    async def ask_person() -> str:
        await asyncio.sleep(1)
        return "yes"

    monkeypatch.setattr(host_tools, "TOOL_TIMEOUT_SECONDS", 0.1)
    (result,) = await batch(["SUBMIT(ask_person())"], tools={"ask_person": ask_person}, tool_timeout=None)
    assert result.output == "yes"
    with pytest.raises(ConfigurationError, match="tool_timeout"):
        await batch(["SUBMIT(1)"], tool_timeout=0)


class Customer(BaseModel):
    name: str
    since: datetime.date


@dataclass
class Price:
    amount: Decimal
    tags: set[str]


RETURNED: list[tuple[Any, Any]] = [
    (Customer(name="Ann", since=datetime.date(2024, 2, 29)), {"name": "Ann", "since": "2024-02-29"}),
    ([Price(Decimal("1.10"), {"b", "a"})], [{"amount": "1.10", "tags": ["a", "b"]}]),
    ({"at": datetime.datetime(2024, 1, 2, 3, 4, tzinfo=datetime.UTC)}, {"at": "2024-01-02T03:04:00Z"}),
    (pandas.DataFrame({"id": [1, 2], "late": [None, 0.5]}), [{"id": 1, "late": None}, {"id": 2, "late": 0.5}]),
    (polars.DataFrame({"id": [1], "day": [datetime.date(2024, 1, 2)]}), [{"id": 1, "day": "2024-01-02"}]),
    (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
]


async def test_objects_that_tools_return_become_json():
    tools = {f"get_{number}": lambda value=value: value for number, (value, _) in enumerate(RETURNED)}
    code = f"SUBMIT([{', '.join(f'{name}()' for name in tools)}])"
    (result,) = await batch([code], tools=tools, provider="local:none")
    assert result.output == [expected for _, expected in RETURNED]
    indexed = pandas.DataFrame({"id": [1], "x": [2]}).set_index("id")
    wrong: list[Any] = [object(), math.nan, {"a": open}, indexed]
    tools = {f"get_{number}": lambda value=value: value for number, value in enumerate(wrong)}
    code = "said = []\nfor get in (get_0, get_1, get_2, get_3):\n    try: get()\n"
    code += "    except TypeError as error: said.append(str(error))\nSUBMIT(said)"
    (result,) = await batch([code], tools=tools, provider="local:none")
    assert [text.partition(":")[0] for text in result.output] == [f"get_{n} returned no JSON" for n in range(4)]
    assert result.output[3].endswith("with the index id, which rows would lose: use value.reset_index()")


@pytest.mark.parametrize("name", ["query", "context", "SUBMIT", "a b"])
async def test_a_name_that_the_code_of_a_question_has_is_refused_before_anything_runs(name: str):
    with pytest.raises(ConfigurationError, match=f"the tool '{name}' has a name"):
        await rlm("q?", "openai/gpt-4o-mini", tools={name: len})
    for tools in ([len], {1: len}):
        with pytest.raises(ConfigurationError, match=r"pass a dict|has a name"):
            open_rlm("openai/gpt-4o-mini", tools=tools)
    if name != "query":
        with pytest.raises(ConfigurationError, match=f"the tool '{name}' has a name"):
            open_rlm("openai/gpt-4o-mini", tools={name: len})


async def test_invalid_tools_are_refused_before_a_sandbox_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow: Callable[..., None]
):
    wrong: list[tuple[dict[Any, Any], str]] = [
        ({"look up": len}, "has a name that code cannot use"),
        ({"SUBMIT": len}, "a name that code .* has already"),
        ({"size": object()}, "is neither a function nor a value that JSON can hold"),
        ({"size": "a text"}, "is 'a text': pass a function, or its import path"),
        ({"size": {"tool": "no.such:function", "description": "d"}}, "no.such:function, cannot be imported"),
        ({"size": "os.path"}, "is 'os.path': pass a function"),
        ({"size": '{"tool_value": 1'}, "pass a function"),
        ({"size": "no.such:function"}, "no.such:function, cannot be imported on this host"),
        ({"size": "os.path:nothing"}, "cannot be imported on this host"),
        ({"size": "os.path:sep"}, "is no function but str"),
    ]
    for tools, message in wrong:
        with pytest.raises(ConfigurationError, match=message):
            await batch(["SUBMIT(1)"], tools=tools, results_path=tmp_path / "ledger")
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "as a worker has it")
    allow(allowed_paths=[str(tmp_path)])
    with pytest.raises(ConfigurationError, match=r"does not let deployments call os\.path:basename"):
        await batch(["SUBMIT(1)"], tools={"size": "os.path:basename"})
    allow(allowed_tools=["os.path:basename", "json:dumps"])
    assert (await batch(["SUBMIT(size('/a'))"], tools={"size": "os.path:basename"}))[0].output == "a"


def get_tools() -> dict[str, Any]:
    return {
        "rates": {"tool": {"vat": [0.2, math.inf]}, "description": "Tax rates by name."},
        "manual": {"tool": "Read this. " * 40_000, "description": "How to count."},
        "get_size": {"tool": "os.path:getsize", "description": "Return the bytes of a file."},
        "shout": {"tool": str.upper, "description": "Write large."},
        "limit": 7,
        "names": ("a", "b"),
    }


async def test_values_and_descriptions_are_tools(chat: ChatServer, openai: ChatServer, tmp_path: Path):
    code = "SUBMIT([rates['vat'][1] > 9, len(manual), get_size('/') > 0, shout('a'), limit, names])"
    expected = [True, 440_000, True, "A", 7, ["a", "b"]]
    ledger = tmp_path / "ledger"
    (result,) = await batch([code], tools=get_tools(), provider="local:none", results_path=ledger)
    assert result.output == expected
    assert result.meta.variables == {}
    assert result.meta.tool_calls == {"get_size": 1, "shout": 1}
    (again,) = await batch([code], tools=get_tools(), provider="local:none", results_path=ledger)
    assert again.meta.sandbox_id == result.meta.sandbox_id
    changed = {**get_tools(), "limit": 8}
    (other,) = await batch([code], tools=changed, provider="local:none", results_path=ledger)
    assert other.output == [*expected[:4], 8, ["a", "b"]]

    chat.script = lambda _: format_turn(f"limit = 9\n{code.replace('limit, ', '7, ')}")
    async with open_rlm(NAME, "local:none", tools=get_tools()) as session:
        for question in ("q?", "again?"):
            assert (await session.ask(question)).value == expected
    answer = await rlm("q?", NAME, tools=get_tools(), provider="local:none")
    assert answer.value == expected
    for request in (chat.requests[0], chat.requests[-1]):
        instructions = request.messages[0]
        assert "- `rates`: a dict of 1 keys: 'vat', the first value is a list of 2 items" in instructions
        assert ". Tax rates by name.\n- `manual`: a str of 440,000 characters. How to count.\n" in instructions
        assert "`get_size(filename)`: Return the bytes of a file.\n- `shout(self, /)`: Write large.\n" in instructions
        assert "- `limit`: an int.\n- `names`: a list of 2 items" in instructions


async def test_a_value_of_a_tool_is_found_anew_in_each_turn(chat: ChatServer, openai: ChatServer):
    turns = iter([format_turn("limits.append(3)\nprint(limits)"), format_turn("SUBMIT(limits)")])
    chat.script = lambda _: next(turns)
    async with open_rlm(NAME, "local:none", tools={"limits": [1, 2]}) as session:
        answer = await session.ask("q?")
    assert answer.value == [1, 2]
    assert answer.trajectory[0]["output"] == "[1, 2, 3]"


async def test_the_model_reads_what_its_code_finds(chat: ChatServer, openai: ChatServer):
    """Values become JSON, and a partial has the docstring of its function."""
    chat.script = lambda _: format_turn("SUBMIT([price, rows, divide(9)])")
    tools = {"price": Price(Decimal("1.10"), set()), "rows": pandas.DataFrame({"id": [1, 2]})}
    async with open_rlm(NAME, "local:none", tools={**tools, "divide": functools.partial(divide, by=2)}) as session:
        answer = await session.ask("q?")
    assert answer.value == [{"amount": "1.10", "tags": []}, [{"id": 1}, {"id": 2}], 4.5]
    instructions = chat.requests[0].messages[0]
    assert "- `price`: a dict of 2 keys: 'amount', 'tags'" in instructions
    assert "- `rows`: a list of 2 items, the first is a dict" in instructions
    assert "- `divide(number: float, *, by: float = 2) -> float`: Divide a number." in instructions
    assert "without waits for queries and tools" in instructions


async def test_a_deployment_takes_values_as_tools(allow: Callable[..., None]):
    assert parameter_schema(batch.fn).properties["tools"]["additionalProperties"] is True  # The server takes any JSON.
    allow(allow_no_isolation=True)
    tools = {"limit": 7, "page": {"tool": "<b>", "description": "A page."}, "nothing": None}
    run = await Deployed.made(code=["SUBMIT([limit, page, nothing])"], tools=tools, provider="local:none")
    state = await run.execute()
    assert (await state.result())[0].output == [7, "<b>", None]
