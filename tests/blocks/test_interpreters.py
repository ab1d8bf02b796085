"""Interpreters for scripts: each imports its provider without Prefect, and all take the same keywords."""

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest

import rlm_batch

from ..infra.isolation_levels import find_strongest_level

PROGRAM = """
import sys
import rlm_batch

name, fields = sys.argv[1], dict(word.split("=") for word in sys.argv[2:])
prepared = {"prepare": "import random\\nbase = 40", "prepare_timeout": 60, "prepare_seed": 1}
with getattr(rlm_batch, name)(**prepared, **fields) as interpreter:
    assert interpreter.execute("SUBMIT(y=base + 2)").y == 42
print(sorted({module.partition(".")[0] for module in sys.modules} & {"prefect", "daytona", "modal", "litellm"}))
"""


def run_script(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def clean(no_process_left: None) -> None:
    """Check after each test that no process is left."""


def test_a_local_interpreter_runs_prepare_without_importing_prefect() -> None:
    assert run_script("LocalInterpreter", "isolation=none") == "[]"


@pytest.mark.full
def test_a_daytona_interpreter_imports_its_sdk_and_no_prefect(running_daytona: object, daytona: Any) -> None:
    assert run_script("DaytonaInterpreter") == "['daytona']"


@pytest.mark.full
def test_a_modal_interpreter_imports_its_sdk_and_no_prefect(modal_standin: Any) -> None:
    hello = modal_standin.hello
    credentials = [f"{name}={hello[name]}" for name in ("token_id", "token_secret")]
    assert run_script("ModalInterpreter", *credentials) == "['modal']"


def test_an_invalid_prepare_is_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prepare_seed": 1}, "needs prepare"),
        ({"prepare": "x", "prepare_timeout": 0}, "above 0"),
        ({"prepare": ""}, "prepare is empty"),
    ]
    for fields, message in wrong:
        with pytest.raises(rlm_batch.ConfigurationError, match=message):
            rlm_batch.LocalInterpreter(**fields)
    # The kernel may count all of an ordinary user's processes, including those of other tests.
    others = 0 if os.getuid() == 0 or find_strongest_level() == "bubblewrap" else 1000
    with rlm_batch.LocalInterpreter(processes=3 + others, prepare="x = 1") as interpreter:
        assert [interpreter.execute("SUBMIT(x=x)").x for _ in range(3)] == [1, 1, 1]


@pytest.mark.anyio
async def test_an_async_interpreter_has_the_same_methods() -> None:
    heard: list[tuple[str, str]] = []
    async with rlm_batch.AsyncLocalInterpreter(isolation="none", tools={"double": lambda x: 2 * x}) as interpreter:
        code = "x = double(n)\nprint(x)"
        result = await interpreter.execute(code, {"n": 2}, on_output=lambda *item: heard.append(item))
        assert (heard, result.meta.stdout) == ([("stdout", "4\n")], "4\n")
        await interpreter.upload("file.txt", "kept")
        is_running, may_end = asyncio.Event(), asyncio.Event()

        async def begin() -> None:
            is_running.set()
            await may_end.wait()

        interpreter.tools["begin"] = begin
        cancelled = asyncio.create_task(interpreter.execute("begin()"))
        await is_running.wait()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (await interpreter.execute("SUBMIT(x)")).output == 4  # a cancellation keeps the state
        is_running.clear()
        running = asyncio.create_task(interpreter.execute("begin(); SUBMIT(x)"))
        await is_running.wait()
        with pytest.raises(rlm_batch.ConfigurationError, match="during an execution"):
            await interpreter.reset()
        may_end.set()
        assert (await running).output == 4
        await interpreter.reset()
        assert (await running).output == 4
        await interpreter.reset()
        assert (await interpreter.execute("SUBMIT('x' in globals())")).output is False
        assert await interpreter.download("file.txt") == b"kept"
        with pytest.raises(rlm_batch.ConfigurationError, match="belongs to another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(interpreter.start()))
        await interpreter.shutdown()
        assert (await interpreter.execute("SUBMIT(1)")).meta.sandbox_id != result.meta.sandbox_id
