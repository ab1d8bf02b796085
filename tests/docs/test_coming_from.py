"""The page for programs of other recursive models: the ported programs run, and code finds its calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlm_batch import open_rlm

from ..infra.scripted_turns import DSPY_MARK, MARK, format_dspy_turn, format_turn
from ..standins.openai_chat import ChatServer, Reply, Request
from .pages import blocks, names, sections, table_rows
from .test_programs import write_files

pytestmark = [pytest.mark.usefixtures("openai"), pytest.mark.timeout(600)]  # importing DSPy takes long

NAME = "openai/gpt-4o-mini"
PAGE = "docs/coming-from.md"
IMPORTS = {row[0]: names(" ".join(row[1:])) for row in table_rows(sections(PAGE)["Coming from fleet-rlm"]) if row[2:]}
THREADS = """
from concurrent.futures import ThreadPoolExecutor
{line}

def run(number):
    interp = {interpreter}(timeout=120)
    interp.start()
    try:
        return interp.execute(f"import math; SUBMIT(task={{number}}, value=math.factorial({{number}}))")
    finally:
        interp.shutdown()

with ThreadPoolExecutor(max_workers=2) as pool:
    values = [result.value for result in pool.map(run, range(4))]
"""
# The code that a model writes for the program with these words, and what the program prints.
QUICKSTARTS = [
    ("haystack", "SUBMIT(next(line for line in context.splitlines() if 'SECRET' in line).split('=')[1])", "417_553"),
    ("MARKET", "p = fetch_stock_price\nSUBMIT([10 * p('AAPL')['price'], MARKET['currency']])", '[1785.0, "USD"]'),
    ("dspy.RLM(", "SUBMIT(output=[word for word in context.split() if word[0].isdigit()][0].rstrip('.'))", "417"),
    ("output_type", "SUBMIT([word for word in context.split() if word[0].isdigit()][0].rstrip('.'))", "417"),
    ("Summarize the architecture", "SUBMIT(len(context))", "14000"),
    ("rlm-volume-dspy", "", "hello"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "printed"), QUICKSTARTS, ids=[words for words, *_ in QUICKSTARTS])
def test_a_ported_first_program_prints_its_output(
    server: str,
    openai: ChatServer,
    account: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    code: str,
    printed: str,
) -> None:
    """The model's code uses the context, the tools and the prepared names of the program."""
    (block,) = [block for block in blocks("python") if block.page == PAGE and words in block.text]
    if "Daytona" in block.text:
        account("daytona")
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    openai.script = lambda request: (
        format_dspy_turn(code) if DSPY_MARK in request.text else format_turn(code) if MARK in request.text else None
    )
    exec(compile(block.text, PAGE, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip() == printed


@pytest.mark.parametrize("provider", ["Daytona", "Modal"])
def test_a_program_for_fleet_rlm_runs_with_the_new_import(provider: str, account: Callable[..., None]) -> None:
    account(provider.lower())
    before, now = IMPORTS[f"for {provider}"]
    program = THREADS.format(line=before, interpreter=f"{provider}Interpreter")
    values: dict[str, object] = {}
    exec(program.replace(before, now), values)
    assert values["values"] == [1, 1, 2, 6]


@pytest.mark.anyio
async def test_code_for_other_recursive_models_finds_its_calls(chat: ChatServer) -> None:
    """A model is named by position or keyword, and SHOW_VARS returns what the code has defined."""
    code = """
        words = context.split()
        def count(): pass
        print(SHOW_VARS())
        print([llm_query("flat", "small"), *llm_query_batched(["flat", "flat"], "small")])
        print(rlm_query("deeper", model="small"), *rlm_query_batched(["deeper"], model="small"))
        for ask in (llm_query, rlm_query):
            try:
                ask("flat", model="large")
            except QueryError as error:
                print(error)
        SUBMIT(len(words))
    """

    def script(request: Request) -> Reply | str | None:
        if MARK not in request.text:
            return None
        if "deeper" in request.messages[1]:
            return format_turn("SUBMIT(llm_query('below'))")
        return format_turn("SUBMIT('ok')" if "is the answer" in request.text else code)

    chat.script = script
    async with open_rlm(NAME, "local:none", context="a b", models={"small": "openai/gpt-4o"}) as session:
        answer = await session.ask("How many words?")
    assert answer.value == 2
    shown, flat, deeper, *refused = answer.trajectory[0]["output"].splitlines()
    assert eval(shown) == {"context": "str", "words": "list", "count": "function"}
    assert flat == str(["answer to: flat"] * 3)
    assert deeper == "answer to: below answer to: below"
    assert refused[:2] == ["no model 'large' is allowed here: the names are 'small'"] * 2
    by_model = [(request.model, MARK in request.text) for request in chat.requests]
    assert sorted(set(by_model)) == [("gpt-4o", False), ("gpt-4o", True), ("gpt-4o-mini", False), ("gpt-4o-mini", True)]
    assert [query["model"] for query in answer.queries.tree[0]["queries"]].count("openai/gpt-4o") == 5


def test_every_program_of_the_page_is_tested() -> None:
    assert len([block for block in blocks("python") if block.page == PAGE]) == len(QUICKSTARTS)
