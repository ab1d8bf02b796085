"""The synchronous face: the same executions, step by step, from threads that have no event loop."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from rlm_batch import (
    CodeCrashed,
    CodeError,
    CodeSyntaxError,
    ConfigurationError,
    ExecutionTimeout,
    OutcomeUnknown,
    PrepareError,
    StateLost,
    SubmitError,
    VolumeError,
)
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.driver_settings import Preparation
from rlm_batch.sandbox.sync_interpreter import SyncInterpreter

pytestmark = pytest.mark.local_first
Make = Callable[..., SyncInterpreter]


@pytest.fixture
def make(provider: SandboxProvider) -> Iterator[Make]:
    """Makes interpreters that are shut down in the end."""
    made: list[SyncInterpreter] = []

    def make(**settings: Any) -> SyncInterpreter:
        made.append(SyncInterpreter(lambda: provider.open(provider.labels("")), **{"timeout": 20, **settings}))
        return made[-1]

    yield make
    for interpreter in made:
        interpreter.shutdown()


@pytest.mark.every_provider
def test_results_state_and_output_come_back(make: Make) -> None:
    with make() as interpreter:
        first = interpreter.execute("x = total + 1\nprint('hello')\nSUBMIT(x=x)", {"total": 41})
        assert first.x == 42
        assert (first.meta.stdout, first.meta.variables) == ("hello\n", {"total": 41})
        assert interpreter.execute("SUBMIT(x=x)").x == 42
        assert not interpreter.execute("x += 1").meta.submitted
        assert interpreter.execute("SUBMIT(x)").output == 43


@pytest.mark.every_provider
def test_output_is_heard_as_it_comes_and_a_listener_that_raises_or_blocks_loses_nothing(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    heard, is_open = list[tuple[str, str, bool]](), threading.Event()
    here = threading.get_ident()

    def hear(stream: str, text: str) -> None:
        heard.append((stream, text, threading.get_ident() == here))
        is_open.set()

    def fail(stream: str, text: str) -> None:
        raise OSError(f"{stream}: the disk is full")

    interpreter = make(tools={"gate": lambda: is_open.wait(15)})
    code = "import sys\nprint('one')\nassert gate()\nprint('two', file=sys.stderr)\nSUBMIT(x=1)"
    assert interpreter.execute(code, on_output=hear).x == 1
    assert heard == [("stdout", "one\n", True), ("stderr", "two\n", True)]
    result = interpreter.execute("for _ in range(3): print('y', flush=True)\nSUBMIT(x=2)", on_output=fail)
    assert (result.x, result.meta.stdout) == (2, "y\ny\ny\n")
    assert caplog.text.count("on_output raised OSError: stdout: the disk is full; it is called no more") == 1
    slow = interpreter.execute("print('z')\nSUBMIT(x=3)", timeout=2, on_output=lambda *_: time.sleep(2.5))
    assert (slow.x, slow.meta.stdout) == (3, "z\n")

    again = list[Exception]()

    def run_again(stream: str, text: str) -> None:
        try:
            assert interpreter.execute("SUBMIT(7)").output == 7
        except ConfigurationError as error:
            again.append(error)

    assert interpreter.execute("print('w')\nSUBMIT(x=4)", on_output=run_again).x == 4
    assert all("on_output, cannot run code in the interpreter that waits" in str(error) for error in again)

    def interrupt(stream: str, text: str) -> None:
        raise KeyboardInterrupt

    interpreter.execute("kept = 1")
    with pytest.raises(KeyboardInterrupt):
        interpreter.execute("print('on', flush=True)\nimport time; time.sleep(1000)", on_output=interrupt)
    assert interpreter.execute("SUBMIT(kept=kept)").kept == 1

    async def hear_later(stream: str, text: str) -> None: ...

    with pytest.raises(ConfigurationError, match="on_output is a plain function"):
        interpreter.execute("1", on_output=hear_later)


@pytest.mark.every_provider
def test_a_reset_forgets_the_names_and_keeps_the_sandbox_and_its_files(make: Make) -> None:
    interpreter = make()
    interpreter.reset()  # of what was never opened
    first = interpreter.execute("x = 1\nwith open('kept.txt', 'w') as file: file.write('kept')").meta.sandbox_id
    interpreter.reset()
    result = interpreter.execute("SUBMIT(known='x' in globals(), text=open('kept.txt').read())")
    assert (result.known, result.text, result.meta.sandbox_id) == (False, "kept", first)
    with pytest.raises(CodeCrashed):
        interpreter.execute("import os; os._exit(3)")
    with pytest.raises(StateLost, match=r"after reset\(\)"):
        interpreter.execute("1")
    interpreter.reset()
    interpreter.tools["again"] = interpreter.reset
    code = "x = 2\ntry: again()\nexcept Exception as error: SUBMIT(str(error))"
    assert "while an execution is under way" in interpreter.execute(code).output
    assert interpreter.execute("SUBMIT(x)").output == 2
    interpreter.shutdown()
    interpreter.reset()


@pytest.mark.every_provider
@pytest.mark.own_machine
def test_files_go_into_the_working_folder_and_come_out_of_it_and_no_link_leads_elsewhere(
    make: Make, tmp_path: Path
) -> None:
    with make() as interpreter:
        (tmp_path / "module.py").write_text("ANSWER = 42\n")
        interpreter.upload("module.py", tmp_path / "module.py")
        interpreter.upload("in/data.bin", b"\x00\xff")
        interpreter.upload("in/text.txt", "é")
        code = """
            import module, os
            data, text = open("in/data.bin", "rb").read(), open("in/text.txt", encoding="utf-8").read()
            with open("out.bin", "wb") as file: file.write(data * 3)
            os.mkfifo("pipe")
            os.symlink("/dev/zero", "endless")
            with open("large", "wb") as file: file.truncate(257 * 1024 * 1024)
            SUBMIT(answer=module.ANSWER, text=text)
            """
        assert interpreter.execute(dedent(code)).outputs == {"answer": 42, "text": "é"}
        assert interpreter.download("out.bin") == b"\x00\xff" * 3
        for path, reason in {
            "../out.bin": "no path below the sandbox's working folder",
            "/etc/passwd": "no path below the sandbox's working folder",
            "none": "could not be read",
            "in": "could not be read|no file that could be read",
            "pipe": "no file that could be read",
            "endless": "no file that could be read|is a symbolic link",
            "large": "it has 269,484,032 bytes or more",
        }.items():
            with pytest.raises(VolumeError, match=reason):
                interpreter.download(path)
        for path, data in {"../x": "", "x": tmp_path / "none", "y": Path("/dev/zero")}.items():
            with pytest.raises(VolumeError, match=r"working folder|could not be sent"):
                interpreter.upload(path, data)
        with pytest.raises(ConfigurationError, match="the data of x is a int"):
            interpreter.upload("x", 3)  # type: ignore[arg-type]


def test_it_is_prepared_when_it_starts_and_anew_after_its_end(make: Make) -> None:
    with make(prepare=Preparation("import random\nsteps = ['prepared']", seed=3)) as interpreter:
        first = interpreter.execute("steps.append(1); SUBMIT(steps=steps, drawn=random.random())")
        assert first.steps == ["prepared", 1]
        assert interpreter.execute("SUBMIT(steps=steps, drawn=random.random())").steps == ["prepared", 1]
        interpreter.shutdown()
        again = interpreter.execute("steps.append(2); SUBMIT(steps=steps, drawn=random.random())")
        assert (again.steps, again.drawn) == (["prepared", 2], first.drawn)


def test_what_fails_to_prepare_it_fails_its_start_and_leaves_no_sandbox(make: Make) -> None:
    interpreter = make(prepare=Preparation("print('on')\n1 / 0"))
    for attempt in (interpreter.start, lambda: interpreter.execute("SUBMIT()")):
        with pytest.raises(PrepareError, match=r"prepare raised ZeroDivisionError \(line 2\)") as caught:
            attempt()
        assert caught.value.stdout == "on\n"


def test_each_failure_is_its_own_error_and_the_next_execution_works(make: Make) -> None:
    interpreter = make()
    interpreter.execute("kept = 1")
    for code, kind in (
        ("1 / 0", CodeError),
        ("SUBMIT(x=object())", SubmitError),
        ("exit(3)", CodeCrashed),
        ("x = = 1", CodeSyntaxError),
    ):
        with pytest.raises(kind) as caught:
            interpreter.execute(f"print('begun')\n{code}")
        assert type(caught.value) is kind
        assert caught.value.meta is not None
        assert caught.value.meta.stdout == ("" if kind is CodeSyntaxError else "begun\n")
        assert interpreter.execute("SUBMIT(kept=kept)").kept == 1


def test_a_timeout_keeps_the_state_and_a_kill_loses_it(make: Make) -> None:
    interpreter = make(timeout=0.4)
    interpreter.execute("x = 1", timeout=20)
    with pytest.raises(ExecutionTimeout, match="line 1"):
        interpreter.execute("import time; time.sleep(1000)")
    assert interpreter.execute("SUBMIT(x=x)", timeout=20).x == 1
    with pytest.raises(ExecutionTimeout, match="lost"):
        interpreter.execute("while True:\n    try: time.sleep(9)\n    except BaseException: pass")
    with pytest.raises(StateLost):
        interpreter.execute("SUBMIT(x=x)", timeout=20)
    interpreter.shutdown()
    assert interpreter.execute("SUBMIT(known='x' in globals())", timeout=20).known is False


def test_wrong_arguments_are_refused(make: Make) -> None:
    interpreter = make()
    for arguments in ({"code": b""}, {"code": "", "variables": {"a b": 1}}, {"code": "", "variables": {"x": b""}}):
        with pytest.raises(ConfigurationError):
            interpreter.execute(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="timeout"):
        interpreter.execute("", timeout=-1)
    assert interpreter.execute("SUBMIT(1)").output == 1


def test_a_timeout_of_months_is_as_good_as_any(make: Make) -> None:
    interpreter = make()
    for timeout in (30 * 86_400, 1e15):
        assert interpreter.execute("import time; time.sleep(0.1); SUBMIT(x=1)", timeout=timeout).x == 1


def test_large_values_pass_both_ways(make: Make) -> None:
    with make() as interpreter:
        text = "0123456789abcdé\n" * (20 * 65_536)
        assert interpreter.execute("SUBMIT(n=len(text))", {"text": text}).n == len(text)
        assert interpreter.execute("SUBMIT(part=text[:900_000])").part == text[:900_000]


def test_tools_of_both_kinds_are_called_and_raise(make: Make) -> None:
    async def greet(name: str) -> str:
        await asyncio.sleep(0.01)
        return f"hello {name}"

    def fail() -> None:
        raise LookupError("nothing there")

    interpreter = make(tools={"greet": greet, "fail": fail, "add": lambda a, b: a + b})
    code = """
        try:
            fail()
        except LookupError as error:
            SUBMIT(said=str(error), sum=add(1, b=2), greeting=greet("you"))
        """
    expected = {"said": "nothing there", "sum": 3, "greeting": "hello you"}
    assert interpreter.execute(dedent(code)).outputs == expected


def test_the_key_that_a_tool_did_not_find_is_the_one_that_the_code_is_told(make: Make) -> None:
    class NotOnTheMenu(KeyError):
        pass

    def find_price(name: str) -> float:
        return {"tea": 3.5}[name]

    def find_dish(name: str) -> None:
        raise NotOnTheMenu(name)

    interpreter = make(tools={"find_price": find_price, "find_dish": find_dish})
    code = """
        try:
            find_price("milk")
        except KeyError as error:
            try:
                find_dish("soup")
            except RuntimeError as other:
                SUBMIT(key=error.args[0], text=str(error), other=str(other))
        """
    assert interpreter.execute(dedent(code)).outputs == {
        "key": "milk", "text": "'milk'", "other": "NotOnTheMenu: soup",
    }  # fmt: skip
    with pytest.raises(CodeError) as caught:
        interpreter.execute("find_price('milk')")
    assert (caught.value.type, caught.value.message) == ("KeyError", "'milk'")


def test_tools_that_fail_badly_are_errors_in_the_code(make: Make) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def leave() -> None:
        raise SystemExit(3)

    def unprintable() -> None:
        raise Unprintable

    async def cancelled() -> None:
        raise asyncio.CancelledError

    tools = {f.__name__: f for f in (leave, unprintable, cancelled)}
    interpreter = make(tools=tools, timeout=3)
    for name in tools:
        result = interpreter.execute(f"try:\n    {name}()\nexcept Exception as error:\n    SUBMIT(said=str(error))")
        assert result.said


def test_sixteen_threads_call_at_once_and_none_waits_for_the_slow_one(make: Make) -> None:
    calls = threading.Semaphore(0)

    def call(i: int) -> int:
        if i == 0:
            for _ in range(15 * 10):
                assert calls.acquire(timeout=15)
        else:
            calls.release()
        return i

    code = """
        from concurrent.futures import ThreadPoolExecutor
        def work(i):
            return [call(i) for _ in range(10 if i else 1)]
        with ThreadPoolExecutor(16) as pool:
            SUBMIT(answers=list(pool.map(work, range(16))))
        """
    assert make(tools={"call": call}).execute(dedent(code)).answers == [[0], *([i] * 10 for i in range(1, 16))]


def test_a_tool_that_runs_code_in_the_same_interpreter_is_refused(make: Make) -> None:
    interpreter = make()
    interpreter.tools["nested"] = lambda: interpreter.execute("SUBMIT(1)").output
    result = interpreter.execute(
        "try:\n    nested()\nexcept Exception as error:\n    SUBMIT(said=str(error))", timeout=5
    )
    assert "another" in result.said


def test_several_threads_take_turns(make: Make) -> None:
    interpreter = make()
    interpreter.execute("n = 0")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: interpreter.execute("old = n; import time; time.sleep(0.005); n = old + 1"), range(24)))
    assert interpreter.execute("SUBMIT(n=n)").n == 24


def test_several_threads_start_one_sandbox(make: Make) -> None:
    interpreter = make()
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: interpreter.execute("SUBMIT()").meta.sandbox_id, range(8)))
    assert len(found) == 1


@pytest.mark.anyio
async def test_it_works_where_an_event_loop_runs(make: Make) -> None:
    with make() as interpreter:
        assert interpreter.execute("SUBMIT(x=1)").x == 1
        assert (await asyncio.to_thread(interpreter.execute, "SUBMIT(x=2)")).x == 2


@pytest.mark.every_provider
def test_shutdown_from_another_thread_ends_the_execution(make: Make) -> None:
    begun = threading.Event()
    interpreter = make(tools={"begin": begun.set}, timeout=None)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(interpreter.execute, "begin()\nimport time; time.sleep(1000)")
        assert begun.wait(15)
        time.sleep(0.05)
        interpreter.shutdown()
        with pytest.raises(OutcomeUnknown, match="shut down"):
            running.result(15)


def test_shutdown_twice_is_no_error_and_a_new_start_is_a_new_sandbox(make: Make) -> None:
    interpreter = make()
    interpreter.shutdown()
    first = interpreter.start().execute("x = 1; SUBMIT()").meta.sandbox_id
    interpreter.start()
    assert interpreter.execute("SUBMIT(x=x)").meta.sandbox_id == first
    interpreter.shutdown()
    interpreter.shutdown()
    second = interpreter.execute("SUBMIT(known='x' in globals())")
    assert second.known is False
    assert second.meta.sandbox_id != first


def test_output_is_capped(make: Make) -> None:
    result = make().execute("for i in range(5_000): print('0123456789' * 10)")
    assert "characters dropped" in result.meta.stdout
    assert len(result.meta.stdout) < 101_000


def test_a_hundred_executions(make: Make) -> None:
    interpreter = make()
    assert [interpreter.execute("SUBMIT(i=i)", {"i": i}).i for i in range(100)] == list(range(100))
