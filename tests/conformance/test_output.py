"""Tests that the output of code and its processes is streamed to the host, complete up to a limit."""

import asyncio
import re
from contextlib import suppress
from textwrap import dedent

import pytest

from rlm_batch import CodeError
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.driver_settings import OUTPUT_CAP_CHARACTERS
from rlm_batch.sandbox.interpreter import Interpreter

from .gate import Gate

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

HALF = OUTPUT_CAP_CHARACTERS // 2
GAP = re.compile(r"\n\[\.\.\. ([\d,]+) characters dropped \.\.\.\]\n")


def split_truncated(text: str) -> tuple[str, int, str]:
    """Return a truncated output's head, its number of dropped characters, and its tail."""
    head, dropped, tail = GAP.split(text)
    return head, int(dropped.replace(",", "")), tail


async def test_prints_of_every_kind_come_back(interpreter: Interpreter) -> None:
    code = """
        import ctypes, os, subprocess, sys, threading, warnings
        print("print", 1, sep="-", flush=True)
        sys.stdout.write("write\\n")
        sys.stdout.buffer.write(b"buffer\\n")
        sys.stdout.flush()
        os.write(1, b"descriptor\\n")
        subprocess.run(["sh", "-c", "echo subprocess; echo to stderr >&2"])
        os.system("echo system")
        libc = ctypes.CDLL(None)
        libc.puts(b"from C")
        libc.fflush(None)
        print("error", file=sys.stderr)
        warnings.warn("careful")
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        sys.__stdout__.write("original\\n")
        print("no newline", end="")
        """
    for context in (None, "c"):
        result = await interpreter.execute(dedent(code), context=context)
        lines = ["print-1", "write", "buffer", "descriptor", "subprocess", "system", "from C", "original", "no newline"]
        assert result.meta.stdout.splitlines() == lines
        assert result.meta.stderr.startswith("to stderr\nerror\n")
        assert "UserWarning: careful" in result.meta.stderr
        assert "ZeroDivisionError" in result.meta.stderr


@pytest.mark.every_provider
async def test_output_that_imitates_our_protocol_comes_back_as_text(interpreter: Interpreter) -> None:
    lines = [
        '{"op":"end","id":1,"n":1,"status":"submitted","body":7}', '{"x":1}', '{"op":"beat","id":0,"n":999999}',
        '{"op":"ready","id":0,"n":10000}', "\0\0\0", "{", '{"body":1000000000}',
    ]  # fmt: skip
    code = """
        import os
        for line in lines:
            print(line, flush=True)
            os.write(2, line.encode() + b"\\n")
        SUBMIT(x=2)
        """
    result = await interpreter.execute(dedent(code), {"lines": lines})
    assert result.x == 2
    assert result.meta.stdout.splitlines() == result.meta.stderr.splitlines() == lines
    code = (
        "import os; print('x' + chr(0xD800), flush=True); os.write(1, b'a\\xff\\xfeb\\xc3'); os.write(2, b'\\xe2\\x82')"
    )
    result = await interpreter.execute(code)
    assert (result.meta.stdout, result.meta.stderr) == ("x\\ud800\na��b�", "�")
    code = """
        import os, time
        for byte in "aé€😀z".encode():
            os.write(1, bytes([byte]))
            time.sleep(0.01)
        """
    assert (await interpreter.execute(dedent(code))).meta.stdout == "aé€😀z"


@pytest.mark.every_provider
async def test_ten_megabytes_come_back_as_head_omitted_count_and_tail(interpreter: Interpreter) -> None:
    code = """
        for i in range(10_000):
            print(f"{i:09}" + "." * 990)
        """
    heard: list[str] = []
    result = await interpreter.execute(dedent(code), on_output=lambda _, text: heard.append(text))
    head, dropped, tail = split_truncated(result.meta.stdout)
    assert (len(head), len(tail)) == (HALF, HALF)
    assert dropped == 10_000_000 - OUTPUT_CAP_CHARACTERS
    assert head.startswith("000000000.")
    assert tail.endswith("000009999" + "." * 990 + "\n")
    assert "".join(heard) == result.meta.stdout


async def test_the_cap_applies_to_each_stream_of_each_execution(interpreter: Interpreter) -> None:
    code = "import sys; print('😀' * n, end=''); print(chr(1) * (n + 1), end='', file=sys.stderr)"
    for context in (None, "c", "c"):
        result = await interpreter.execute(code, {"n": OUTPUT_CAP_CHARACTERS}, context=context)
        assert result.meta.stdout == "😀" * OUTPUT_CAP_CHARACTERS
        assert split_truncated(result.meta.stderr) == ("\x01" * HALF, 1, "\x01" * HALF)


@pytest.mark.every_provider
async def test_output_is_streamed_while_the_code_runs(provider: SandboxProvider) -> None:
    heard: list[tuple[str, str]] = []
    first = asyncio.Event()

    def on_output(stream: str, text: str) -> None:
        heard.append((stream, text))
        first.set()

    async def gate() -> None:
        await first.wait()

    async with provider.interpreter(tools={"gate": gate}) as interpreter:
        code = "import sys\nprint('one')\ngate()\nprint('two', file=sys.stderr)"
        for context in (None, "c"):
            heard.clear()
            first.clear()
            result = await interpreter.execute(code, context=context, on_output=on_output)
            assert heard == [("stdout", "one\n"), ("stderr", "two\n")]
            assert (result.meta.stdout, result.meta.stderr) == ("one\n", "two\n")


async def test_a_failing_listener_harms_no_other_execution(interpreter: Interpreter) -> None:
    def on_output(stream: str, text: str) -> None:
        raise OSError("the disk is full")

    interpreter.tools["wait"] = gate = Gate()
    other = asyncio.ensure_future(interpreter.execute("print('y'); wait(); print('y'); SUBMIT()"))
    await gate.is_reached.wait()
    with suppress(OSError):
        await interpreter.execute("print('x'); SUBMIT(x=1)", on_output=on_output)
    gate.open()
    assert (await other).meta.stdout == "y\ny\n"


async def test_errors_contain_the_output(interpreter: Interpreter) -> None:
    with pytest.raises(CodeError) as caught:
        await interpreter.execute("print('begun', end='')\nimport os\nos._exit(3)")
    assert caught.value.stdout == ""  # Python never flushed its own buffer
    with pytest.raises(CodeError) as caught:
        await interpreter.execute("print('begun')\nraise ValueError")
    assert caught.value.stdout == "begun\n"


async def test_the_last_prints_in_a_context_belong_to_their_execution(interpreter: Interpreter) -> None:
    for i in range(40):
        result = await interpreter.execute(f"print({i}); print({i}, end='')", context="c")
        assert result.meta.stdout == f"{i}\n{i}"


async def test_prints_after_a_display_belong_to_the_same_execution(interpreter: Interpreter) -> None:
    code = """
        import os
        for _ in range(4):
            os.write(2, b"x" * 60_000)
            display(0)
        print("last")
        """
    for _ in range(40):  # a driver that reads displays first loses four of these prints
        assert (await interpreter.execute(dedent(code), context="c")).meta.stdout == "last\n"


async def test_code_may_close_or_replace_its_streams(interpreter: Interpreter) -> None:
    for spoil in ("sys.stdout.close()", "sys.stdout = None", "sys.stdout = 5", "del sys.stdout", "os.close(1)"):
        result = await interpreter.execute(f"import os, sys; {spoil}; sys.stderr = None; SUBMIT(x=1)")
        assert result.x == 1


async def test_output_of_one_execution_never_reaches_another(interpreter: Interpreter) -> None:
    async def printed(i: int) -> None:
        code = "import time\nfor _ in range(50): print(i); time.sleep(0.001)"
        result = await interpreter.execute(code, {"i": i}, context=None if i % 2 else f"c{i}")
        assert result.meta.stdout == f"{i}\n" * 50

    await asyncio.gather(*(printed(i) for i in range(12)))
