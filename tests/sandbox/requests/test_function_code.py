"""Tests of functions as code: the source that is sent, and the errors for functions that cannot be sent."""

import functools
import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rlm_batch import CodeError, ConfigurationError, LocalInterpreter
from rlm_batch.sandbox.requests.function_code import convert_code, find_parameters

OUTSIDE = 3


def train(rate: np.float64, layers: int = 2) -> "np.float64":
    """Use names of outer imports in annotations, which are not evaluated."""
    import math as m

    def scale(x: np.float64) -> float:
        return m.sqrt(x)

    return {"loss": scale(rate) + layers}  # type: ignore[return-value]


def count_down(type: int, all: int = 1) -> Any:
    return count_down(type - 1) if type else {"all": all}


def pair(x: Any) -> list[Any]:
    return [x, x]


def by_number(x: int) -> dict[int, int]:
    return {x: x}


def nothing(x: int) -> None:
    print(x)


def divide(x: int) -> float:
    y = x
    return y / 0


def define_state(x: int) -> None:
    global state
    state = x  # type: ignore[name-defined]


def use_state(state: int) -> int:
    return state + 1


async def answer_later(x: int) -> int:
    import asyncio

    async def double() -> int:
        await asyncio.sleep(0)
        return 2 * x

    return sum(await asyncio.gather(double(), double()))


def uses_global(x: int) -> int:
    return sum(x + OUTSIDE for _ in range(2))


class Proxy:
    """A proxy such as Flask's `request`, which works only during a request."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("working outside of request context")


proxy = Proxy()


def uses_proxy(x: int) -> Any:
    return proxy


def uses_import(x: int) -> Any:
    return np.zeros(x)


def has_default(x: int = OUTSIDE) -> int:
    return x


def calls_tool(x: int) -> Any:
    return lookup(x)  # type: ignore[name-defined]  # noqa: F821


def takes_any(*x: int) -> Any:
    return x


def hides(SUBMIT: int) -> int:
    return SUBMIT


def same(function: Any) -> Any:
    return function


@same
def is_marked(x: int) -> int:
    return x


class Model:
    def predict(self, x: int) -> int:
        return x


def make_inner() -> tuple[Any, Any]:
    seed = 1

    def closure(x: int) -> int:
        return x + seed

    def indented(x: int) -> str:
        text = f"""one

        two{
        x=}"""
        return text * x

    return closure, indented


closure, indented = make_inner()
exec("def typed(x): return x")

REFUSED = [
    (closure, "uses seed of the function around it"),
    (lambda x: x, "is a lambda"),
    (Model().predict, "is a method"),
    (is_marked, "is decorated"),
    (functools.cache(same), "is a _lru_cache_wrapper, or decorated"),
    (globals()["typed"], "its source is unknown"),
    (len, "is a builtin_function_or_method"),
    (Model, "is a type"),
    (functools.partial(pair, 1), "is a partial"),
    (
        uses_global,
        "uses OUTSIDE, which it does not define. Define or import it in the function, or make it a parameter",
    ),
    (uses_proxy, "uses proxy, which it does not define"),
    (uses_import, "Write `import numpy as np` in the function"),
    (has_default, "uses OUTSIDE"),
    (calls_tool, "uses lookup, which it does not define"),
    (takes_any, r"its parameter \*x: int is no variable"),
    (hides, "SUBMIT is the name of a function that code finds"),
]


def test_an_error_names_a_function_that_cannot_be_sent():
    for function, reason in REFUSED:
        with pytest.raises(ConfigurationError, match=reason):
            convert_code(function)


def test_a_function_becomes_the_same_code_anywhere_in_a_file(tmp_path: Path):
    assert convert_code(indented).startswith(
        'def indented(x: int) -> str:\n    text = f"""one\n\n        two{\n        x=}"""\n'
    )
    texts = []
    for name, before in (("one", ""), ("two", "import os\n\n\n")):
        (tmp_path / f"{name}.py").write_text(before + "def double(x):\n    return 2 * x\n")
        texts.append(convert_code(load_module(tmp_path / f"{name}.py").double))
    assert texts[0] == texts[1]
    parameters = find_parameters(convert_code(train))
    assert parameters is not None
    assert (parameters.names, parameters.required) == (("rate", "layers"), ("rate",))
    assert find_parameters("SUBMIT(x=1)") is None
    parameters = find_parameters(convert_code(answer_later))
    assert parameters is not None
    assert (parameters.function, parameters.required) == ("answer_later", ("x",))


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_function_whose_file_has_another_one_in_its_place_is_refused(tmp_path: Path):
    path = tmp_path / "changing.py"
    path.write_text("def double(x):\n    return 2 * x\n")
    module = load_module(path)
    path.write_text("def triple(x):\n    return 3 * x\n")
    with pytest.raises(ConfigurationError, match="its source is unknown, or changed since it was imported"):
        convert_code(module.double)


def test_a_parameter_may_be_named_like_a_builtin_in_its_annotation():
    def total(list: list[int]) -> int:
        return sum(list)

    names: dict[str, object] = {"list": [1, 2], "SUBMIT": lambda value: names.update(submitted=value)}
    exec(convert_code(total), names)
    assert names["submitted"] == 3


def test_functions_of_installed_modules_are_sent_and_of_old_commands_refused():
    assert convert_code(textwrap.indent).startswith("def indent(text, prefix, predicate=None):\n")
    program = "from rlm_batch import LocalInterpreter\ndef f(x): return x\nLocalInterpreter().execute(f, {'x': 1})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    if sys.version_info >= (3, 13):  # Python 3.13 keeps the source of a `-c` program.
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 1
        assert "the function f cannot be sent to a sandbox: its source is unknown" in done.stderr


def test_an_interpreter_runs_functions_with_variables_as_parameters():
    with LocalInterpreter(isolation="none") as interpreter:
        assert interpreter.execute(train, {"rate": 4, "layers": 7}).outputs == {"loss": 9}
        assert interpreter.execute(train, {"rate": 9}).outputs == {"loss": 5}  # the default, not the last value
        assert interpreter.execute(count_down, {"type": 3, "all": 5}).outputs == {"all": 1}
        assert interpreter.execute(pair, {"x": "é"}).output == ["é", "é"]
        assert interpreter.execute(answer_later, {"x": 3}).output == 12
        result = interpreter.execute(nothing, {"x": 1})
        assert (result.outputs, result.meta.submitted, result.meta.stdout) == ({}, False, "1\n")
        with pytest.raises(ConfigurationError, match="has no parameter for the variable 'depth'"):
            interpreter.execute(train, {"rate": 1, "depth": 2})
        with pytest.raises(Exception, match="the key 1, which is not a string"):
            interpreter.execute(by_number, {"x": 1})
        with pytest.raises(CodeError, match="missing 1 required positional argument: 'state'"):
            interpreter.execute(use_state)
        interpreter.execute(define_state, {"x": 4})
        assert interpreter.execute(use_state).output == 5
        with pytest.raises(CodeError, match="ZeroDivisionError") as failed:
            interpreter.execute(divide, {"x": 1})
        assert failed.value.line == 3  # counted from the function's first line
        interpreter.tools["lookup"] = lambda x: x * 2
        assert interpreter.execute(calls_tool, {"x": 4}).output == 8
