"""Tests of variables: they are top-level names when the code starts, and no other host names are."""

import math
from textwrap import dedent
from typing import Any

import pytest

from rlm_batch import ConfigurationError
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.interpreter import Interpreter
from rlm_batch.sandbox.requests.execution_request import encode_variable

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]


@pytest.mark.every_provider
async def test_variables_are_global_names_and_meta_says_where_code_ran(
    interpreter: Interpreter, provider: SandboxProvider
) -> None:
    variables: dict[str, Any] = {"lr": 0.001, "größe": [1, {"a": None}], "_": True}
    code = "def f(): return größe\nimport time; time.sleep(0.1)\nSUBMIT(lr=lr, g=f(), u=_)"
    result = await interpreter.execute(code, variables)
    assert result.outputs == {"lr": 0.001, "g": [1, {"a": None}], "u": True}
    assert result.meta.variables == variables
    assert result.meta.seconds >= 0.1
    assert result.meta.sandbox_id
    assert result.meta.provider
    assert result.meta.isolation in (await provider.check()).lower()
    micro = "\N{MICRO SIGN}"  # keyboards type this character, and Python reads it as a Greek mu
    assert (await interpreter.execute(f"SUBMIT(x={micro})", {micro: 0.5})).x == 0.5


async def test_an_error_names_variables_that_code_cannot_use(interpreter: Interpreter) -> None:
    interpreter.tools["ask"] = lambda: None
    for name in ("", "a b", "1x", "a-b", "class", "None", "lambda", "x.y"):
        with pytest.raises(ConfigurationError, match="rename it"):
            await interpreter.execute("SUBMIT()", {name: 1})
    for name in ("SUBMIT", "ask"):
        with pytest.raises(ConfigurationError, match=f"'{name}' has the name of a function"):
            await interpreter.execute("SUBMIT()", {name: 1})
    with pytest.raises(ConfigurationError):
        await interpreter.execute("SUBMIT()", {1: 1})  # type: ignore[dict-item]
    itself: list[Any] = []
    itself.append(itself)
    for value in (b"x", {1: 2}, {3}, object(), 1j, "\ud800", itself, 10**5000):
        with pytest.raises(ConfigurationError) as caught:
            await interpreter.execute("SUBMIT()", {"fine": 1, "rate": value})
        assert "rate" in str(caught.value)
        assert str(caught.value).encode()
    for code in (b"SUBMIT()", None, "x = '\ud800'"):
        with pytest.raises(ConfigurationError, match="code"):
            await interpreter.execute(code)  # type: ignore[arg-type]


async def test_deeply_nested_values_arrive_or_are_refused(interpreter: Interpreter) -> None:
    code = """
        depth = 0
        while value:
            (value,), depth = value, depth + 1
        SUBMIT(depth=depth)
        """
    for depth in (100, 400, *range(800, 1000, 40), 5000):
        value: list[Any] = []
        for _ in range(depth):
            value = [value]
        try:
            result = await interpreter.execute(dedent(code), {"value": value})
        except ConfigurationError as error:
            assert depth > 100, "that much nesting is usual"
            assert "nested" in str(error)  # noqa: PT017 - either outcome is right
        else:
            assert result.depth == depth


async def test_large_variables_and_large_code_arrive(interpreter: Interpreter) -> None:
    text = "0123456789abcdé\n" * (12 * 65_536)
    for context in (None, "c"):
        result = await interpreter.execute("SUBMIT(n=len(text), end=text[-3:])", {"text": text}, context=context)
        assert result.outputs == {"n": len(text), "end": "dé\n"}
    code = "x = 0\n" + "x += 1  # a line of a long program\n" * 20_000 + "SUBMIT(x=x)"
    assert (await interpreter.execute(code)).x == 20_000


async def test_encoded_variables_behave_like_other_variables(interpreter: Interpreter) -> None:
    code = "import os\nSUBMIT(x=x, y=[len(y['text']), y['text'][-1], y['x']], z=str(z), left=os.listdir('.'))"
    for size in (10, 1_000_000):
        encoded = {"y": encode_variable({"text": "é" * size, "x": [math.inf]}), "z": encode_variable(math.nan)}
        result = await interpreter.execute(code, {"x": 1}, encoded=encoded)
        assert result.outputs == {"x": 1, "y": [size, "é", [math.inf]], "z": "nan", "left": []}
        assert result.meta.variables == {"x": 1}
    assert (await interpreter.execute("SUBMIT(y)", encoded={"y": encode_variable([1])})).output == [1]
    with pytest.raises(ConfigurationError, match="'a b' has a name"):
        await interpreter.execute("pass", encoded={"a b": encode_variable(1)})


async def test_code_runs_as_main_without_names_of_the_driver(interpreter: Interpreter) -> None:
    code = """
        import sys, __main__
        names = sorted(name for name in globals() if not name.startswith("__"))
        SUBMIT(name=__name__, names=names, argv=len(sys.argv), main=__main__.__dict__ is globals(), doc=__doc__)
        """
    result = await interpreter.execute(dedent(code), {"x": 1})
    errors = ["BudgetExceeded", "DeadlineExceeded", "DepthExceeded", "QueryError"]
    volume = ["VOLUME", "VolumeError", "list_volume", "load_from_volume", "save_to_volume"]
    queries = ["llm_query", "llm_query_batched", "rlm_query", "rlm_query_batched"]
    names = sorted([*errors, *queries, *volume, "SUBMIT", "display", "report", "sys", "x"])
    assert result.outputs == {"name": "__main__", "names": names, "argv": 1, "main": True, "doc": None}


async def test_code_runs_with_fresh_modules_and_may_be_empty(interpreter: Interpreter) -> None:
    code = "def f(x: 1 + 1): pass\nSUBMIT(x=f.__annotations__['x'])"
    assert (await interpreter.execute(code)).x == 2, "no future import of ours applies to it"
    await interpreter.execute("import json, os; json.spoilt = 1; os.environ['SPOILT'] = '1'")
    code = "import json, os; SUBMIT(spoilt=hasattr(json, 'spoilt') or 'SPOILT' in os.environ)"
    assert (await interpreter.execute(code)).spoilt is False
    for code in ("", "\n", "# nothing", "\r\nx = 1\r\n"):
        assert not (await interpreter.execute(code)).meta.submitted
