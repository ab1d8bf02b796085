"""Each way in which code fails becomes an error of its own, others finish, and the sandbox lives on."""

import asyncio
import re
from textwrap import dedent

import pytest

from rlm_batch import CodeCrashed, CodeError, CodeSyntaxError, ExecutionTimeout, LocalSandbox, SubmitError
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.errors import RlmBatchError
from rlm_batch.sandbox.interpreter import Interpreter

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

FAILING: dict[str, tuple[str, type[RlmBatchError], str]] = {
    "raises": ("1 / 0", CodeError, r"raised ZeroDivisionError \(line 1\): division by zero"),
    "does not compile": ("x = = 1", CodeSyntaxError, r"not valid Python \(line 1\)"),
    "exits": ("import os; os._exit(3)", CodeCrashed, r"exited with status 3 .*os\._exit"),
    "crashes": ("import ctypes; ctypes.string_at(0)", CodeCrashed, "killed by SIGSEGV"),
    "allocates without end": (
        "x = [bytearray(10**7) for _ in range(10**6)]",
        CodeCrashed,
        "out of memory|want of memory",
    ),
    "submits an object": ("SUBMIT(x=object())", SubmitError, "x is a object, which is not JSON"),
    "submits 2 MiB": ("SUBMIT(x='x' * 2 * 1024 ** 2)", SubmitError, "volume"),
}


@pytest.mark.every_provider
async def test_each_failure_is_its_own_error_and_the_others_finish(small_provider: SandboxProvider) -> None:
    async with small_provider.interpreter(timeout=20) as interpreter:
        fine = [interpreter.execute("import time; time.sleep(0.3); SUBMIT(i=i)", {"i": i}) for i in range(3)]
        late = interpreter.execute("import time; time.sleep(1000)", timeout=0.5)
        failing = [interpreter.execute(code) for code, _, _ in FAILING.values()]
        *outcomes, timeout, first, second, third = await asyncio.gather(*failing, late, *fine, return_exceptions=True)
        assert isinstance(timeout, ExecutionTimeout)
        assert [result.i for result in (first, second, third)] == [0, 1, 2]  # type: ignore[union-attr]
        for (_, kind, said), outcome in zip(FAILING.values(), outcomes, strict=True):
            assert type(outcome) is kind
            assert re.search(said, str(outcome), re.DOTALL)


async def test_the_next_execution_in_the_sandbox_works(small_provider: SandboxProvider) -> None:
    async with small_provider.interpreter(timeout=20) as interpreter:
        for code, kind, said in FAILING.values():
            with pytest.raises(kind, match=said):
                await interpreter.execute(code)
            assert (await interpreter.execute("SUBMIT(fine=True)")).fine
        with pytest.raises(ExecutionTimeout):
            await interpreter.execute("while True: pass", timeout=0.2)
        assert (await interpreter.execute("SUBMIT(fine=True)")).fine


@pytest.mark.every_provider
async def test_an_error_tells_type_message_traceback_line_and_stdout(interpreter: Interpreter) -> None:
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


async def test_a_syntax_error_shows_the_line_and_nothing_ran(interpreter: Interpreter) -> None:
    with pytest.raises(CodeSyntaxError) as caught:
        await interpreter.execute("print('ran')\nif True:\nprint('x')\n")
    error = caught.value
    assert (error.type, error.line, error.stdout) == ("IndentationError", 3, "")
    assert "print('x')" in error.traceback
    assert "driver" not in str(error)


@pytest.mark.local_first
@pytest.mark.parametrize("opening", ["```python", "\n  ```", "```PY "])
async def test_a_markdown_fence_around_code_is_taken_off_and_lines_keep_their_numbers(
    interpreter: Interpreter, opening: str
) -> None:
    result = await interpreter.execute(f"{opening}\nx = '''\n  t\x0cw\u2028o\n'''\nSUBMIT(x=x)\n```\n")
    assert result.outputs == {"x": "\n  t\x0cw\u2028o\n"}
    with pytest.raises(CodeError) as caught:
        await interpreter.execute(f"{opening}\n\n1 / 0\n```")
    assert caught.value.line == opening.count("\n") + 3


@pytest.mark.local_first
@pytest.mark.parametrize(
    "code", ["```python\nx = 1", "```sh\nls\n```", "```\nx = 1\n```\nthen\n```\ny = 2\n```", "```", "``````"]
)
async def test_what_is_no_fence_around_all_of_the_code_is_a_syntax_error(interpreter: Interpreter, code: str) -> None:
    with pytest.raises(CodeSyntaxError):
        await interpreter.execute(code)


async def test_text_that_no_python_can_read_is_a_syntax_error(interpreter: Interpreter) -> None:
    for code in ("x = 1\0", "(" * 500, "x = '\\N{no such name}'", "return 1", "yield x", "from __future__ import no"):
        with pytest.raises(CodeSyntaxError):
            await interpreter.execute(code)


async def test_a_syntax_error_in_what_the_code_compiles_itself_is_its_own_error(interpreter: Interpreter) -> None:
    with pytest.raises(CodeError) as caught:
        await interpreter.execute("\neval('1 +')")
    assert type(caught.value) is CodeError
    assert (caught.value.type, caught.value.line) == ("SyntaxError", 2)


async def test_exit_says_how_a_value_is_handed_back(interpreter: Interpreter) -> None:
    for code, status in (
        ("exit(4)", 4), ("quit('no data')", 1), ("import sys; sys.exit([1])", 1), ("raise SystemExit(True)", 1),
        ("import sys; sys.exit(10 ** 5000)", 1),
    ):  # fmt: skip
        with pytest.raises(CodeCrashed, match="SUBMIT") as caught:
            await interpreter.execute(code)
        assert "exit(" in caught.value.summary, code
        assert caught.value.exit_code == status or code.endswith("5000)")


async def test_a_clean_exit_is_an_end_like_any_other(interpreter: Interpreter) -> None:
    for code in ("import sys; sys.exit()", "exit(0)", "raise SystemExit"):
        assert not (await interpreter.execute(f"print('said')\n{code}")).meta.submitted


async def test_errors_that_cannot_be_printed_are_errors_all_the_same(interpreter: Interpreter) -> None:
    code = """
        class Odd(Exception):
            def __str__(self):
                raise RuntimeError("no text for you")
        raise Odd
        """
    with pytest.raises(CodeError) as caught:
        await interpreter.execute(dedent(code))
    assert caught.value.type == "Odd"
    for raising in ("chr(0xD800)", "'x' * 10 ** 7", "'\\0\\x1b[31m'", "b'\\xff'"):
        with pytest.raises(CodeError) as caught:
            await interpreter.execute(f"raise ValueError({raising})")
        assert caught.value.type == "ValueError"
        assert len(str(caught.value)) < 100_000
        assert str(caught.value).encode()


async def test_endless_recursion_is_a_code_error(interpreter: Interpreter) -> None:
    with pytest.raises(CodeError) as caught:
        await interpreter.execute("def f(): f()\nf()")
    assert caught.value.type == "RecursionError"


async def test_base_exceptions_of_the_code_are_its_errors(interpreter: Interpreter) -> None:
    for name in ("KeyboardInterrupt", "GeneratorExit", "BaseException", "Stopped"):
        with pytest.raises(CodeError) as caught:
            await interpreter.execute(f"class Stopped(BaseException): pass\nraise {name}('enough')")
        assert (caught.value.type, caught.value.message) == (name, "enough")


async def test_groups_and_causes_stand_in_the_traceback(interpreter: Interpreter) -> None:
    code = """
        try:
            {}["key"]
        except KeyError as error:
            raise RuntimeError("outer") from error
        """
    with pytest.raises(CodeError, match="direct cause") as caught:
        await interpreter.execute(dedent(code))
    assert "KeyError: 'key'" in caught.value.traceback


MEMORY = {
    "large pieces": "x = [bytearray(10**7) for _ in range(10**6)]",
    "one piece": "x = bytearray(10**12)",
    "small pieces": "x = []\nwhile True: x.append([0])",
    "in a function": "def f():\n    x = []\n    while True: x.append({'a': 1.5 + len(x)})\nf()",
    "a doubled text": "x = 'ab'\nwhile True: x += x",
}


async def test_out_of_memory_says_so_and_names_the_setting_for_more(small_provider: SandboxProvider) -> None:
    option = "memory" if small_provider.provider_name == "daytona" else "memory_mib"
    async with small_provider.interpreter(timeout=60) as interpreter:
        for name, code in MEMORY.items():
            with pytest.raises(CodeCrashed) as caught:
                await interpreter.execute(code)
            assert caught.value.out_of_memory, f"{name}: {caught.value}"
            assert caught.value.summary.endswith(f"give the sandbox more with {option}"), name


# Stands in for Python, which has come to that where code had filled its memory.
NO_EXCEPTION = "raise SystemError('error return without exception set')"


async def test_the_error_that_python_raises_for_want_of_memory_is_one_only_where_it_has_been_filled() -> None:
    fill = "import resource\nx = b'x' * int(0.7 * resource.getrlimit(resource.RLIMIT_AS)[0])\n"
    async with LocalSandbox(isolation="none", memory_mib=512).interpreter(timeout=60) as interpreter:
        with pytest.raises(CodeCrashed) as caught:
            await interpreter.execute(fill + NO_EXCEPTION)
        assert caught.value.out_of_memory
        with pytest.raises(CodeError, match="SystemError"):
            await interpreter.execute(NO_EXCEPTION)
        with pytest.raises(CodeError, match="SystemError: bad call"):
            await interpreter.execute(fill + "raise SystemError('bad call')")


async def test_code_that_catches_its_memory_error_goes_on(small_provider: SandboxProvider) -> None:
    code = """
        try:
            x = bytearray(10**12)
        except MemoryError:
            SUBMIT(caught=True)
        """
    async with small_provider.interpreter(timeout=20) as interpreter:
        assert (await interpreter.execute(dedent(code))).caught


async def test_a_context_survives_its_memory_error(small_provider: SandboxProvider) -> None:
    async with small_provider.interpreter(timeout=20) as interpreter:
        await interpreter.execute("kept = 1", context="c")
        with pytest.raises(CodeCrashed, match="memory"):
            await interpreter.execute("def f(): return [bytearray(10**7) for _ in range(10**6)]\nf()", context="c")
        assert (await interpreter.execute("SUBMIT(kept=kept)", context="c")).kept == 1


async def test_signals_that_the_code_sends_itself_end_its_own_execution(interpreter: Interpreter) -> None:
    for name, number in (("SIGTERM", 15), ("SIGKILL", 9), ("SIGABRT", 6)):
        with pytest.raises(CodeCrashed, match=name) as caught:
            await interpreter.execute(f"import os, signal; os.kill(os.getpid(), signal.{name})")
        assert caught.value.signal == number
        assert not caught.value.out_of_memory
