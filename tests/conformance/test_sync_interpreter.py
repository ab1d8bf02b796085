"""Tests of the synchronous interpreter, which runs code step by step from threads without an event loop."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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

from ..infra.waiting import HANG_SECONDS

pytestmark = pytest.mark.local_first
Make = Callable[..., SyncInterpreter]


@pytest.fixture
def make(provider: SandboxProvider) -> Iterator[Make]:
    """Yield a function that creates interpreters, and shut them down at the end."""
    made: list[SyncInterpreter] = []

    def make(**settings: Any) -> SyncInterpreter:
        made.append(
            SyncInterpreter(lambda: provider.open(provider.labels("")), **{"timeout": HANG_SECONDS, **settings})
        )
        return made[-1]

    yield make
    for interpreter in made:
        interpreter.shutdown()


@pytest.mark.every_provider
def test_results_state_and_output_are_returned(make: Make) -> None:
    with make() as interpreter:
        first = interpreter.execute("x = total + 1\nprint('hello')\nSUBMIT(x=x)", {"total": 41})
        assert first.x == 42
        assert (first.meta.stdout, first.meta.variables) == ("hello\n", {"total": 41})
        assert interpreter.execute("SUBMIT(x=x)").x == 42
        assert not interpreter.execute("x += 1").meta.submitted
        assert interpreter.execute("SUBMIT(x)").output == 43


@pytest.mark.every_provider
def test_output_is_streamed_and_a_failing_listener_loses_nothing(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    heard, is_open = list[tuple[str, str, bool]](), threading.Event()
    here = threading.get_ident()

    def hear(stream: str, text: str) -> None:
        heard.append((stream, text, threading.get_ident() == here))
        is_open.set()

    def fail(stream: str, text: str) -> None:
        raise OSError(f"{stream}: the disk is full")

    interpreter = make(tools={"gate": lambda: is_open.wait(HANG_SECONDS)})
    code = "import sys\nprint('one')\nassert gate()\nprint('two', file=sys.stderr)\nSUBMIT(x=1)"
    assert interpreter.execute(code, on_output=hear).x == 1
    assert heard == [("stdout", "one\n", True), ("stderr", "two\n", True)]
    result = interpreter.execute("for _ in range(3): print('y', flush=True)\nSUBMIT(x=2)", on_output=fail)
    assert (result.x, result.meta.stdout) == (2, "y\ny\ny\n")
    assert caplog.text.count("on_output raised OSError: stdout: the disk is full; it is not called again") == 1
    again = list[Exception]()

    def run_again(stream: str, text: str) -> None:
        try:
            assert interpreter.execute("SUBMIT(7)").output == 7
        except ConfigurationError as error:
            again.append(error)

    assert interpreter.execute("print('w')\nSUBMIT(x=4)", on_output=run_again).x == 4
    assert all("on_output cannot run code in the interpreter that waits" in str(error) for error in again)

    def interrupt(stream: str, text: str) -> None:
        raise KeyboardInterrupt

    interpreter.execute("kept = 1")
    with pytest.raises(KeyboardInterrupt):
        interpreter.execute("print('on', flush=True)\nimport time; time.sleep(1000)", on_output=interrupt)
    assert interpreter.execute("SUBMIT(kept=kept)").kept == 1

    async def hear_later(stream: str, text: str) -> None: ...

    with pytest.raises(ConfigurationError, match="on_output must be a plain function"):
        interpreter.execute("1", on_output=hear_later)


@pytest.mark.every_provider
def test_a_reset_clears_the_names_and_keeps_sandbox_and_files(make: Make) -> None:
    interpreter = make()
    interpreter.reset()  # the sandbox is not open yet
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
    assert "during an execution" in interpreter.execute(code).output
    assert interpreter.execute("SUBMIT(x)").output == 2
    interpreter.shutdown()
    interpreter.reset()


@pytest.mark.every_provider
def test_files_are_uploaded_and_downloaded_without_following_links(make: Make, tmp_path: Path) -> None:
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
            "../out.bin": "not in the sandbox's working folder",
            "/etc/passwd": "not in the sandbox's working folder",
            "none": "could not be read",
            "in": "could not be read|not a readable file",
            "pipe": "^'pipe' is not a readable file$",
            "endless": "^'endless' is (not a readable file|a symbolic link, which is not followed)$",
            "large": "it has 269,484,032 bytes or more",
        }.items():
            with pytest.raises(VolumeError, match=reason):
                interpreter.download(path)
        for path, data in {"../x": "", "x": tmp_path / "none", "y": Path("/dev/zero"), "in": ""}.items():
            with pytest.raises(VolumeError, match=r"working folder|could not be (sent|written)"):
                interpreter.upload(path, data)
        for path in ("pipe", "endless"):  # They are replaced or refused, and never written to.
            with suppress(VolumeError):
                interpreter.upload(path, "z" * 200_000)
                assert interpreter.download(path) == b"z" * 200_000
        with pytest.raises(ConfigurationError, match="the data of 'x' is an int"):
            interpreter.upload("x", 3)  # type: ignore[arg-type]


def test_prepare_runs_at_each_start(make: Make) -> None:
    with make(prepare=Preparation("import random\nsteps = ['prepared']", seed=3)) as interpreter:
        first = interpreter.execute("steps.append(1); SUBMIT(steps=steps, drawn=random.random())")
        assert first.steps == ["prepared", 1]
        assert interpreter.execute("SUBMIT(steps=steps, drawn=random.random())").steps == ["prepared", 1]
        interpreter.shutdown()
        again = interpreter.execute("steps.append(2); SUBMIT(steps=steps, drawn=random.random())")
        assert (again.steps, again.drawn) == (["prepared", 2], first.drawn)


def test_a_failed_prepare_fails_the_start_and_leaves_no_sandbox(make: Make) -> None:
    interpreter = make(prepare=Preparation("print('on')\n1 / 0"))
    for attempt in (interpreter.start, lambda: interpreter.execute("SUBMIT()")):
        with pytest.raises(PrepareError, match=r"prepare raised ZeroDivisionError \(line 2\)") as caught:
            attempt()
        assert caught.value.stdout == "on\n"


def test_a_listener_that_blocks_beyond_the_timeout_loses_nothing(make: Make) -> None:
    """Check a slow listener; the code has six seconds, and takes milliseconds."""
    interpreter = make()
    interpreter.start()
    slow = interpreter.execute("print('z')\nSUBMIT(x=3)", timeout=6, on_output=lambda *_: time.sleep(7))
    assert (slow.x, slow.meta.stdout) == (3, "z\n")


def test_failures_keep_the_state_and_a_kill_requires_a_new_start(make: Make) -> None:
    interpreter = make()
    interpreter.execute("import time\nkept = 1")
    for code, kind, stdout in (
        ("print('on')\n1 / 0", CodeError, "on\n"),
        ("print('on')\nSUBMIT(x=object())", SubmitError, "on\n"),
        ("x = = 1", CodeSyntaxError, ""),
    ):
        with pytest.raises(kind) as caught:
            interpreter.execute(code)
        assert type(caught.value) is kind
        assert caught.value.meta is not None
        assert caught.value.meta.stdout == stdout
    with pytest.raises(ExecutionTimeout, match=r"timeout of 0\.2 s"):
        interpreter.execute("time.sleep(1000)", timeout=0.2)
    assert interpreter.execute("SUBMIT(kept=kept)", timeout=1e15).kept == 1
    interpreter.execute("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
    with pytest.raises(ExecutionTimeout, match="lost"):
        interpreter.execute("time.sleep(1000)", timeout=0.2)
    with pytest.raises(StateLost):
        interpreter.execute("SUBMIT(kept=kept)")
    interpreter.shutdown()
    interpreter.shutdown()
    assert interpreter.execute("SUBMIT('kept' in globals())").output is False


def test_large_values_are_sent_and_returned_and_output_is_capped(make: Make) -> None:
    text = "0123456789abcdé\n" * (5 * 65_536)
    result = make().execute("print(text)\nSUBMIT(n=len(text), part=text[:900_000])", {"text": text})
    assert (result.n, result.part) == (len(text), text[:900_000])
    assert "characters dropped" in result.meta.stdout
    assert len(result.meta.stdout) < 101_000


def test_a_tool_that_runs_code_in_the_same_interpreter_is_refused(make: Make) -> None:
    interpreter = make()
    interpreter.tools["nested"] = lambda: interpreter.execute("SUBMIT(1)").output
    result = interpreter.execute("try:\n    nested()\nexcept Exception as error:\n    SUBMIT(said=str(error))")
    assert "another" in result.said


def test_threads_share_one_sandbox_and_take_turns(make: Make) -> None:
    interpreter = make()
    code = "n = globals().get('n', 0); old = n; import time; time.sleep(0.005); n = old + 1; SUBMIT(n=n)"
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: interpreter.execute(code), range(16)))
    assert len({result.meta.sandbox_id for result in results}) == 1
    assert sorted(result.n for result in results) == list(range(1, 17))


@pytest.mark.anyio
async def test_the_sync_interpreter_works_inside_a_running_event_loop(make: Make) -> None:
    with make() as interpreter:
        assert interpreter.execute("SUBMIT(x=1)").x == 1
        assert (await asyncio.to_thread(interpreter.execute, "SUBMIT(x=2)")).x == 2


@pytest.mark.every_provider
def test_shutdown_from_another_thread_ends_the_execution(make: Make) -> None:
    begun = threading.Event()
    interpreter = make(tools={"begin": begun.set}, timeout=None)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(interpreter.execute, "begin()\nimport time; time.sleep(1000)")
        assert begun.wait(HANG_SECONDS)
        interpreter.shutdown()
        with pytest.raises(OutcomeUnknown, match="shut down"):
            running.result(HANG_SECONDS)
