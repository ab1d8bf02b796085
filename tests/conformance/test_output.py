"""What code prints comes back: as it is written, whole up to the cap, and whoever writes it."""

import asyncio
import re
from textwrap import dedent

import pytest

from rlm_batch import CodeError, Result
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.driver_settings import OUTPUT_CAP_CHARACTERS
from rlm_batch.sandbox.interpreter import Interpreter

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

HALF = OUTPUT_CAP_CHARACTERS // 2
GAP = re.compile(r"\n\[\.\.\. ([\d,]+) characters dropped \.\.\.\]\n")


def parts(text: str) -> tuple[str, int, str]:
    """The head of an output that was cut, the number of characters that were dropped, and its tail."""
    head, dropped, tail = GAP.split(text)
    return head, int(dropped.replace(",", "")), tail


@pytest.mark.every_provider
async def test_prints_of_every_kind_come_back(interpreter: Interpreter) -> None:
    code = """
        import os, subprocess, sys
        print("print", 1, sep="-", flush=True)
        sys.stdout.write("write\\n")
        sys.stdout.buffer.write(b"buffer\\n")
        sys.stdout.flush()
        os.write(1, b"descriptor\\n")
        subprocess.run(["sh", "-c", "echo subprocess; echo to stderr >&2"])
        os.system("echo system")
        print("error", file=sys.stderr)
        sys.__stdout__.write("original\\n")
        print("no newline", end="")
        """
    for context in (None, "c"):
        result = await interpreter.execute(dedent(code), context=context)
        lines = ["print-1", "write", "buffer", "descriptor", "subprocess", "system", "original", "no newline"]
        assert result.meta.stdout.splitlines() == lines
        assert result.meta.stderr == "to stderr\nerror\n"


async def test_c_libraries_print_too(interpreter: Interpreter) -> None:
    code = """
        import ctypes
        libc = ctypes.CDLL(None)
        libc.puts(b"from C")
        libc.fflush(None)
        """
    assert (await interpreter.execute(dedent(code))).meta.stdout == "from C\n"


async def test_warnings_and_threads_that_fail_are_on_stderr(interpreter: Interpreter) -> None:
    code = """
        import threading, warnings
        warnings.warn("careful")
        threading.Thread(target=lambda: 1 / 0).start()
        """
    result = await interpreter.execute(dedent(code))
    assert "UserWarning: careful" in result.meta.stderr
    assert "ZeroDivisionError" in result.meta.stderr


@pytest.mark.every_provider
async def test_what_looks_like_a_frame_is_text(interpreter: Interpreter) -> None:
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


async def test_text_split_across_writes_is_put_together(interpreter: Interpreter) -> None:
    code = """
        import os, time
        for byte in "aé€😀z".encode():
            os.write(1, bytes([byte]))
            time.sleep(0.02)
        """
    assert (await interpreter.execute(dedent(code))).meta.stdout == "aé€😀z"


@pytest.mark.every_provider
async def test_what_is_no_text_is_replaced(interpreter: Interpreter) -> None:
    code = "import os; os.write(1, b'a\\xff\\xfeb\\xc3'); os.write(2, b'\\xe2\\x82')"
    result = await interpreter.execute(code)
    assert result.meta.stdout == "a��b�"
    assert result.meta.stderr == "�"


async def test_a_lone_surrogate_can_be_printed(interpreter: Interpreter) -> None:
    result = await interpreter.execute("print('x' + chr(0xD800))")
    assert result.meta.stdout == "x\\ud800\n"


@pytest.mark.every_provider
async def test_fifty_megabytes_come_back_as_head_count_and_tail(interpreter: Interpreter) -> None:
    code = """
        for i in range(50_000):
            print(f"{i:09}" + "." * 990)
        """
    head, dropped, tail = parts((await interpreter.execute(dedent(code))).meta.stdout)
    assert (len(head), len(tail)) == (HALF, HALF)
    assert dropped == 50_000_000 - OUTPUT_CAP_CHARACTERS
    assert head.startswith("000000000.")
    assert tail.endswith("000049999" + "." * 990 + "\n")


async def test_the_cap_is_of_each_stream_and_each_execution(interpreter: Interpreter) -> None:
    code = "import sys; print('o' * n, end=''); print('e' * (n + 1), end='', file=sys.stderr)"
    for context in (None, "c", "c"):
        result = await interpreter.execute(code, {"n": OUTPUT_CAP_CHARACTERS}, context=context)
        assert result.meta.stdout == "o" * OUTPUT_CAP_CHARACTERS
        assert parts(result.meta.stderr) == ("e" * HALF, 1, "e" * HALF)


async def test_the_cap_counts_characters(interpreter: Interpreter) -> None:
    result = await interpreter.execute("print('😀' * n, end='')", {"n": OUTPUT_CAP_CHARACTERS})
    assert result.meta.stdout == "😀" * OUTPUT_CAP_CHARACTERS
    result = await interpreter.execute("print(chr(1) * n, end='')", {"n": OUTPUT_CAP_CHARACTERS + 1})
    assert parts(result.meta.stdout) == ("\x01" * HALF, 1, "\x01" * HALF)


@pytest.mark.every_provider
async def test_output_is_streamed_while_the_code_runs(provider: SandboxProvider) -> None:
    heard: list[tuple[str, str]] = []
    first = asyncio.Event()

    def on_output(stream: str, text: str) -> None:
        heard.append((stream, text))
        first.set()

    async def gate() -> None:
        await first.wait()

    async with provider.interpreter(timeout=20, tools={"gate": gate}) as interpreter:
        code = "import sys\nprint('one')\ngate()\nprint('two', file=sys.stderr)"
        for context in (None, "c"):
            heard.clear()
            first.clear()
            result = await interpreter.execute(code, context=context, on_output=on_output)
            assert heard == [("stdout", "one\n"), ("stderr", "two\n")]
            assert (result.meta.stdout, result.meta.stderr) == ("one\n", "two\n")


async def test_what_streams_is_what_stands_in_the_result(interpreter: Interpreter) -> None:
    heard: list[str] = []
    code = "import time\nfor i in range(200_000):\n    print(i)\n    if i == 100_000: time.sleep(0.3)"
    result = await interpreter.execute(code, on_output=lambda _, text: heard.append(text))
    assert "".join(heard) == result.meta.stdout
    assert len(heard) > 1


async def test_a_listener_that_fails_harms_no_other_execution(interpreter: Interpreter) -> None:
    def on_output(stream: str, text: str) -> None:
        raise OSError("the disk is full")

    listened = interpreter.execute("print('x'); SUBMIT(x=1)", on_output=on_output)
    other = interpreter.execute("import time\nfor _ in range(20): print('y'); time.sleep(0.02)\nSUBMIT(y=1)")
    async with asyncio.timeout(15):
        outcome, result = await asyncio.gather(listened, other, return_exceptions=True)
    assert isinstance(outcome, Result) or str(outcome) == "the disk is full"
    assert isinstance(result, Result)
    assert result.meta.stdout == "y\n" * 20


async def test_output_stands_in_errors(interpreter: Interpreter) -> None:
    with pytest.raises(CodeError) as caught:
        await interpreter.execute("print('begun', end='')\nimport os\nos._exit(3)")
    assert caught.value.stdout == ""  # Python's own buffer was never written out
    with pytest.raises(CodeError) as caught:
        await interpreter.execute("print('begun')\nraise ValueError")
    assert caught.value.stdout == "begun\n"


async def test_the_last_prints_of_a_context_belong_to_the_execution_that_made_them(interpreter: Interpreter) -> None:
    for i in range(100):
        result = await interpreter.execute(f"print({i}); print({i}, end='')", context="c")
        assert result.meta.stdout == f"{i}\n{i}"


async def test_what_a_context_prints_after_it_has_shown_something_is_its_own_too(interpreter: Interpreter) -> None:
    code = """
        import os
        for _ in range(4):
            os.write(2, b"x" * 60_000)
            display(0)
        print("last")
        """
    for _ in range(100):  # of which a driver that reads what is said before what was printed loses ten
        assert (await interpreter.execute(dedent(code), context="c")).meta.stdout == "last\n"


async def test_streams_that_the_code_closes_or_replaces_are_its_own_loss(interpreter: Interpreter) -> None:
    for spoil in ("sys.stdout.close()", "sys.stdout = None", "sys.stdout = 5", "del sys.stdout", "os.close(1)"):
        result = await interpreter.execute(f"import os, sys; {spoil}; sys.stderr = None; SUBMIT(x=1)")
        assert result.x == 1


async def test_output_of_one_execution_is_never_anothers(interpreter: Interpreter) -> None:
    async def printed(i: int) -> None:
        code = "import time\nfor _ in range(50): print(i); time.sleep(0.001)"
        result = await interpreter.execute(code, {"i": i}, context=None if i % 2 else f"c{i}")
        assert result.meta.stdout == f"{i}\n" * 50

    await asyncio.gather(*(printed(i) for i in range(12)))
