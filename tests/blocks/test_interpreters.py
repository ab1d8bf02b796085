"""What a script pays for an interpreter: its provider, and no Prefect."""

import asyncio
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rlm_batch
from rlm_batch.blocks.interpreters import InterpreterKeywords

from ..infra.isolation_levels import find_strongest_level

PROGRAM = """
import sys
import rlm_batch

name, fields = sys.argv[1], dict(word.split("=") for word in sys.argv[2:])
with getattr(rlm_batch, name)(**fields) as interpreter:
    assert interpreter.execute("SUBMIT(total=sum(range(10)))").total == 45
print(sorted({module.partition(".")[0] for module in sys.modules} & {"prefect", "daytona", "modal", "litellm"}))
"""


def run_script(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def clean(no_process_left: None) -> None:
    """Every test here starts processes."""


def test_a_local_interpreter_imports_no_prefect() -> None:
    assert run_script("LocalInterpreter", "isolation=none") == "[]"


@pytest.mark.full
def test_a_daytona_interpreter_imports_its_sdk_and_no_prefect(running_daytona: object, daytona: Any) -> None:
    assert run_script("DaytonaInterpreter") == "['daytona']"


@pytest.mark.full
def test_a_modal_interpreter_imports_its_sdk_and_no_prefect(modal_standin: Any) -> None:
    hello = modal_standin.hello
    credentials = [f"{name}={hello[name]}" for name in ("token_id", "token_secret")]
    assert run_script("ModalInterpreter", *credentials) == "['modal']"


@pytest.mark.parametrize("name", ["LocalInterpreter", "DaytonaInterpreter", "ModalInterpreter"])
def test_every_interpreter_takes_what_prepares_it(
    name: str, running_daytona: object, modal_process: object, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    request.getfixturevalue("account")(name.removesuffix("Interpreter").lower())
    make: Any = getattr(rlm_batch, name)
    options: dict[str, Any] = {"isolation": "none"} if name == "LocalInterpreter" else {}
    if name == "ModalInterpreter":
        options["workdir"] = str(tmp_path)  # what is there on any machine
    with make(prepare="import random\nbase = 40", prepare_timeout=20, prepare_seed=1, **options) as interpreter:
        assert interpreter.execute("SUBMIT(y=base + 2)").y == 42
    for wrong, said in (
        ({"prepare_seed": 1}, "goes with prepare"),
        ({"prepare": "x", "prepare_timeout": 0}, "above zero"),
        ({"prepare": ""}, "prepare is empty"),
        ({"prepare": "x = '\ud800'"}, "prepare is no UTF-8 text"),
    ):
        with pytest.raises(rlm_batch.ConfigurationError, match=said):
            make(**wrong)


@pytest.mark.anyio
async def test_an_async_interpreter_has_the_same_methods_awaited() -> None:
    heard: list[tuple[str, str]] = []
    async with rlm_batch.AsyncLocalInterpreter(isolation="none", tools={"double": lambda x: 2 * x}) as interpreter:
        code = "x = double(n)\nprint(x)"
        result = await interpreter.execute(code, {"n": 2}, on_output=lambda *item: heard.append(item))
        assert (heard, result.meta.stdout) == ([("stdout", "4\n")], "4\n")
        await interpreter.upload("file.txt", "kept")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(interpreter.execute("import time; time.sleep(1000)"), 0.3)
        assert (await interpreter.execute("SUBMIT(x)")).output == 4  # a cancellation keeps the state
        is_running = asyncio.Event()
        interpreter.tools["begin"] = is_running.set
        running = asyncio.create_task(interpreter.execute("begin(); time.sleep(0.3); SUBMIT(x)"))
        await is_running.wait()
        with pytest.raises(rlm_batch.ConfigurationError, match="while an execution is under way"):
            await interpreter.reset()
        assert (await running).output == 4
        await interpreter.reset()
        assert (await interpreter.execute("SUBMIT('x' in globals())")).output is False
        assert await interpreter.download("file.txt") == b"kept"
        with pytest.raises(rlm_batch.ConfigurationError, match="was started on another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(interpreter.start()))
        await interpreter.shutdown()
        assert (await interpreter.execute("SUBMIT(1)")).meta.sandbox_id != result.meta.sandbox_id


@pytest.mark.parametrize(
    "name", ["LocalInterpreter", "AsyncLocalInterpreter", "DaytonaInterpreter", "ModalInterpreter"]
)
def test_type_checkers_know_the_keywords_of_every_interpreter(name: str) -> None:
    parameters = inspect.signature(getattr(rlm_batch, name)).parameters.values()
    taken = {item.name: item.annotation for item in parameters if item.kind is inspect.Parameter.KEYWORD_ONLY}
    assert taken == {name: hint.__forward_arg__ for name, hint in InterpreterKeywords.__annotations__.items()}


def test_an_interpreter_that_has_no_room_for_what_is_prepared_is_refused_at_once() -> None:
    with pytest.raises(rlm_batch.ConfigurationError, match="processes is 2, and prepare takes 3"):
        rlm_batch.LocalInterpreter(processes=2, prepare="x = 1")
    # Where the kernel counts all that an ordinary user runs, the programs of other tests come and go meanwhile.
    others = 0 if os.getuid() == 0 or find_strongest_level() == "bubblewrap" else 200
    with rlm_batch.LocalInterpreter(processes=3 + others, prepare="x = 1") as interpreter:
        assert [interpreter.execute("SUBMIT(x=x)").x for _ in range(3)] == [1, 1, 1]
