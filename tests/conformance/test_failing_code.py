"""Tests that each kind of failure has its own error, while other executions finish and the sandbox stays usable."""

import asyncio
import re
from textwrap import dedent

import pytest

from rlm_batch import CodeCrashed, CodeError, CodeSyntaxError, ExecutionTimeout, SubmitError
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.errors import RlmBatchError
from rlm_batch.sandbox.interpreter import Interpreter

from ..infra.waiting import HANG_SECONDS
from .gate import Gate

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

FAILING: dict[str, tuple[str, type[RlmBatchError], str]] = {
    "raises": ("1 / 0", CodeError, r"raised ZeroDivisionError \(line 1\): division by zero"),
    "does not compile": ("x = = 1", CodeSyntaxError, r"not valid Python \(line 1\): invalid syntax\n"),
    "exits": ("import os; os._exit(3)", CodeCrashed, r"exited with status 3 .*os\._exit"),
    "crashes": ("import ctypes; ctypes.string_at(0)", CodeCrashed, "killed by SIGSEGV"),
    "gets an alarm": ("import signal; signal.raise_signal(14)", CodeCrashed, "killed by SIGALRM"),
    "installs in a notebook": (
        "x = 1\n!pip install -q numpy>=2 'scikit-learn' -r more.txt",
        CodeSyntaxError,
        r"\(line 2\).*\n`!pip .*` is a command of notebooks.*; packages are set in the provider's `packages`",
    ),
    "sets up a notebook": ("%matplotlib inline", CodeSyntaxError, "`%matplotlib inline` is a command of .*: remove it"),
    "runs a program in a notebook": ("files = !ls", CodeSyntaxError, "`!ls` is .*subprocess.run runs programs$"),
    "installs": (
        "import subprocess, sys\nsubprocess.check_call([sys.executable, '-m', 'pip', 'install', '--no-index', 'n0'])",
        CodeError,
        r"\nThe code cannot install packages: add them to the provider's `packages`$",
    ),
    "asks for a terabyte": ("x = bytearray(10**12)", CodeCrashed, "out of memory|want of memory"),
    "submits an object": ("SUBMIT(x=object())", SubmitError, "x is an object, which is not JSON"),
    "submits 2 MiB": ("SUBMIT(x='x' * 2 * 1024 ** 2)", SubmitError, "volume"),
}


@pytest.mark.every_provider
async def test_each_failure_raises_its_error_and_other_executions_finish(
    small_provider: SandboxProvider,
) -> None:
    gate = Gate()
    async with small_provider.interpreter(timeout=HANG_SECONDS, tools={"wait": gate}) as interpreter:
        others = [asyncio.ensure_future(interpreter.execute("wait(); SUBMIT(i=i)", {"i": i})) for i in range(3)]
        await gate.is_reached.wait()
        for code, kind, said in FAILING.values():
            with pytest.raises(kind) as caught:
                await interpreter.execute(code)
            assert type(caught.value) is kind
            assert re.search(said, str(caught.value), re.DOTALL)
            assert (await interpreter.execute("SUBMIT(fine=True)")).fine
        with pytest.raises(ExecutionTimeout):
            await interpreter.execute("while True: pass", timeout=0.2)
        gate.open()
        assert [(await other).i for other in others] == [0, 1, 2]


async def test_an_error_has_type_message_traceback_line_and_stdout(interpreter: Interpreter) -> None:
    code = """\
        import json
        class ModelDiverged(ValueError):
            pass
        def train(lr):
            if lr > 0.1:
                raise ModelDiverged(f"at {lr}")
        print("begun")
        train(0.5)
        """
    with pytest.raises(CodeError) as caught:
        await interpreter.execute(dedent(code))
    error = caught.value
    assert (error.type, error.message, error.line, error.stdout) == ("ModelDiverged", "at 0.5", 6, "begun\n")
    assert "line 8, in <module>\n    train(0.5)\n" in error.traceback
    assert 'line 6, in train\n    raise ModelDiverged(f"at {lr}")\n' in error.traceback
    assert error.traceback in str(error)
    assert "driver" not in str(error)
    assert error.meta is not None
    assert error.meta.stdout == "begun\n"
    assert error.meta.sandbox_id == (await interpreter.execute("SUBMIT()")).meta.sandbox_id != ""


async def test_a_syntax_error_shows_the_line_and_runs_nothing(interpreter: Interpreter) -> None:
    with pytest.raises(CodeSyntaxError) as caught:
        await interpreter.execute("print('ran')\nif True:\nprint('x')\n")
    error = caught.value
    assert (error.type, error.line, error.stdout) == ("IndentationError", 3, "")
    assert "print('x')" in error.traceback
    assert "driver" not in str(error)


# Text that models and editors write around code.
WRAPPED = {
    "a fence": "```python\n{}\n```",
    "a fence with an indent": "\n  ```PY \n{}\n```\n",
    "words around a fence": "Sure, here it is:\n\n```python\n{}\n```\nIt prints 'x'.",
    "a fence that is cut off": "```python\n{}",
    "a fence after words in its line": "Sure! ```py3\n{}```",
    "a fence in a fence": "```\n```python\n{}\n```\n```",
    "other languages before": "```bash\npip install x\n```\n```\n3.14\n```\nThen:\n```python title='a.py'\n{}\n```",
    "several fences": "```\n{}\n```\nor\n```\nSUBMIT(x=2)\n```",
    "a fence of a notebook": "```{{python}}\r\n{}\r\n```\r\n",
    "a list's item": "1. Run\n   ```repl\n   {}\n   ```\n2. Look",
    "a byte order mark": "\ufeff{}",
    "an indent": "\n    if True:\n        {}\n",
}


async def test_code_is_extracted_from_a_models_answer(interpreter: Interpreter) -> None:
    for name, text in WRAPPED.items():
        assert (await interpreter.execute(text.format("SUBMIT(x=1)"))).outputs == {"x": 1}, name
        with pytest.raises(CodeError) as caught:
            await interpreter.execute(text.format("1 / 0"))
        assert caught.value.line == text[: text.index("{}")].count("\n") + 1, name
    within = "x = '''\n```\n  t\x0cw\u2028o\n```\n'''\nSUBMIT(x=x)\n"
    for text in (within, f"```python\n{within}```"):
        assert (await interpreter.execute(text)).outputs == {"x": "\n```\n  t\x0cw\u2028o\n```\n"}
    with pytest.raises(CodeSyntaxError, match="It is in a Markdown fence of 'sh', which is not Python"):
        await interpreter.execute("```sh\nls\n```")


NO_FENCES = ("```sh\nls\n```", "```", "``````")
NO_PYTHON = ("x = 1\0", "(" * 500, "x = '\\N{no such name}'", "return 1", "yield x", "from __future__ import no")


async def test_text_that_is_not_python_raises_a_syntax_error(interpreter: Interpreter) -> None:
    for code in (*NO_FENCES, *NO_PYTHON):
        with pytest.raises(CodeSyntaxError):
            await interpreter.execute(code)
    with pytest.raises(CodeError) as caught:
        await interpreter.execute("\neval('1 +')")
    assert type(caught.value) is CodeError, "the code compiled that itself"
    assert (caught.value.type, caught.value.line) == ("SyntaxError", 2)


async def test_exit_with_a_status_points_to_submit_and_exit_zero_succeeds(interpreter: Interpreter) -> None:
    for code, status in (
        ("exit(4)", 4), ("quit('no data')", 1), ("import sys; sys.exit([1])", 1), ("raise SystemExit(True)", 1),
        ("import sys; sys.exit(10 ** 5000)", 1),
    ):  # fmt: skip
        with pytest.raises(CodeCrashed, match="SUBMIT") as caught:
            await interpreter.execute(code)
        assert "exit(" in caught.value.summary, code
        assert caught.value.exit_code == status or code.endswith("5000)")
    for code in ("import sys; sys.exit()", "exit(0)", "raise SystemExit", "help(len)"):
        assert not (await interpreter.execute(f"print('said')\n{code}")).meta.submitted


UNPRINTABLE = """
class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text for you")
raise Odd
"""
CHAINED = """
try:
    {}["key"]
except KeyError as error:
    raise RuntimeError("outer") from error
"""


async def test_unusual_exceptions_raise_code_error(interpreter: Interpreter) -> None:
    for code, kind in ((UNPRINTABLE, "Odd"), ("def f(): f()\nf()", "RecursionError"), (CHAINED, "RuntimeError")):
        with pytest.raises(CodeError) as caught:
            await interpreter.execute(code)
        assert caught.value.type == kind
    assert "direct cause" in caught.value.traceback
    assert "KeyError: 'key'" in caught.value.traceback
    for text in ("chr(0xD800)", "'x' * 10 ** 7", "'\\0\\x1b[31m'", "b'\\xff'"):
        with pytest.raises(CodeError) as caught:
            await interpreter.execute(f"raise ValueError({text})")
        assert caught.value.type == "ValueError"
        assert len(str(caught.value)) < 100_000
        assert str(caught.value).encode()
    for name in ("KeyboardInterrupt", "GeneratorExit", "BaseException", "Stopped"):
        with pytest.raises(CodeError) as caught:
            await interpreter.execute(f"class Stopped(BaseException): pass\nraise {name}('enough')")
        assert (caught.value.type, caught.value.message) == (name, "enough")


MEMORY = {
    "large pieces": "def f(): return [bytearray(10**7) for _ in range(10**6)]\nf()",
    "small pieces": "def f():\n    x = []\n    while True: x.append({'a': 1.5 + len(x)})\nf()",
    "a doubled text": "x = 'ab'\nwhile True: x += x",
}
CATCHING = """
try:
    x = bytearray(10**12)
except MemoryError:
    SUBMIT(caught=True)
"""


async def test_out_of_memory_names_the_setting_and_keeps_a_context(
    small_provider: SandboxProvider,
) -> None:
    option = "memory" if small_provider.provider_name == "daytona" else "memory_mib"
    async with small_provider.interpreter(timeout=HANG_SECONDS) as interpreter:
        await interpreter.execute("kept = 1", context="c")
        for name, code in MEMORY.items():
            with pytest.raises(CodeCrashed) as caught:
                await interpreter.execute(code, context="c" if name == "large pieces" else None)
            assert caught.value.out_of_memory, f"{name}: {caught.value}"
            value = "" if small_provider.provider_name in ("daytona", "modal") else r" \(it is [\d,]+\)"
            assert re.search(f"give the sandbox more with `{option}`{value}$", caught.value.summary), name
        assert (await interpreter.execute("SUBMIT(kept=kept)", context="c")).kept == 1
        assert (await interpreter.execute(CATCHING)).caught


async def test_signals_that_code_sends_itself_end_only_its_execution(interpreter: Interpreter) -> None:
    for name, number in (("SIGTERM", 15), ("SIGKILL", 9), ("SIGABRT", 6)):
        with pytest.raises(CodeCrashed, match=name) as caught:
            await interpreter.execute(f"import os, signal; os.kill(os.getpid(), signal.{name})")
        assert caught.value.signal == number
        assert not caught.value.out_of_memory
