"""Tests that type checkers accept a correct program that uses the package, and report each wrong line of another."""

import json
import os
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

import rlm_batch

from .infra.programs import run_program

RIGHT = """
import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import polars as pl
from prefect import flow
from pydantic import SecretStr

from rlm_batch import AsyncDaytonaInterpreter, AsyncLocalInterpreter, ChunksReport, ConfigurationError
from rlm_batch import DaytonaInterpreter, ExecutionsFailed, Failure, InterpreterFactory, LanguageModel, LocalInterpreter
from rlm_batch import LocalSandbox, ModalInterpreter, OutcomesReport, Result, RlmAnswer
from rlm_batch import RlmAnswers, SessionAnswer, SweepReport, Volume, batch
from rlm_batch import chunks, open_rlm, reap, rlm, run_code
from rlm_batch import sequence, sweep


class Case(TypedDict):
    city: str


def double(x: int) -> int:
    return 2 * x


async def double_later(x: int) -> int:
    return 2 * x


def generate() -> Iterator[dict[str, int]]:
    yield {"a": 1}


async def run_batches() -> list[int]:
    results: OutcomesReport = await batch("SUBMIT(x=1)", inputs=[{"a": 1}, {"b": "x"}], max_workers=8)
    outcomes: Sequence[Result | Failure] = results
    print(len(outcomes), results.to_dataframe(), results.failures[0].error.summary, results.summary().upper())
    seconds = 0.0
    for result in results:
        if isinstance(result, Failure):
            print(result.error.summary, result.meta.index)
        else:
            outputs: dict[str, Any] = result.outputs
            print(outputs, result.x + 1, result["x"], len(result))
            seconds += result.meta.seconds
    cases: list[Case] = [{"city": "Paris"}]
    options: dict[str, Any] = {"retries": 0}
    await batch("SUBMIT(city)", cases, timeout=3, **options)
    mixed = [{"a": 1}, {"a": "one"}]
    await batch("SUBMIT(a)", mixed)
    await batch("SUBMIT(a)", generate())
    await batch("SUBMIT(a)", ({"a": n} for n in range(3)), on_failure="return", shards="auto")
    await batch("SUBMIT(a)", Path("inputs.jsonl"), results_path=Path("results"), max_failures=0.1)
    await batch("SUBMIT(a)", [{"a": np.zeros(3)}], provider_options={"packages": ["numpy"]})
    await batch(f"SUBMIT({n})" for n in range(3))
    await batch(double, [{"x": 1}])
    await batch("SUBMIT(a)", pl.DataFrame({"a": [1]}), results_path=results.results_path)
    await batch("SUBMIT(a)", inputs=pl.DataFrame({"a": [1]}).to_pandas())
    await batch("SUBMIT(a)", inputs="csv/*.csv")
    await batch([double, "SUBMIT(x=1)"])
    return [result.x for result in await batch(("SUBMIT(x=1)", "SUBMIT(x=2)"))]


async def run_others() -> None:
    grid = {"rate": np.linspace(0, 1, 5), "layers": range(3), "name": ("adam", "sgd")}
    swept: SweepReport = await sweep("SUBMIT(loss=1)", grid, objective="loss", direction="maximize")
    print(swept.best.loss, swept.best is None, [trial.meta.index for trial in swept.trials])
    print(len(swept), swept[0].meta.index, [trial.meta.index for trial in swept])
    await sweep("SUBMIT(loss=1)", points=pl.DataFrame({"rate": [1]}))
    await sweep("SUBMIT(loss=1)", points=[{"rate": 1}, {"rate": 0.5}])
    cut: ChunksReport = await chunks("SUBMIT(n=len(data))", data=range(100), chunk_size=10, reduce="SUBMIT(n=1)")
    print(cut["0"].n, cut.reduction.n)
    await chunks("SUBMIT(n=len(data))", data=np.arange(100), chunk_size=10, volume_name="counts")
    for given in ({1: "one", 2: "two"}, {3: "three"}):
        await chunks("SUBMIT(n=len(data))", given)
    by_id = {"one": [1, 2], 2: None}
    await chunks("SUBMIT(n=len(data))", by_id)
    await sweep(double, {"x": [1, 2]}, objective="output")
    await chunks(double, by_id, reduce=double)
    await sequence([double, double])
    steps: OutcomesReport = await sequence(["x = 1", "SUBMIT(x)"], stop_on_error=False)
    stream = rlm.stream("how many?", "openai/gpt-4o-mini", "text", on_turn=print)
    async for event in stream:
        kind: str = event.kind
        print(kind, event.turn, event.query.prompt, event.usage.cost)
    streamed: RlmAnswer = stream.result
    print(streamed.answer)
    answer: RlmAnswer = await rlm("how many?", "openai/gpt-4o-mini", context_file=Path("report.txt"), max_cost=1)
    await rlm("how many?", "openai/gpt-4o-mini", ["a", "b"], output_type=list[str], tools={"double": double})
    answers: RlmAnswers = await rlm(
        queries=["a", "b"], language_model=LanguageModel(model="m"), context={"a": 1}, max_workers=2
    )
    total: RlmAnswers = rlm.sync(inputs=[{"query": "a", "context": "b"}], language_model="m", sub_model="n")
    print([item.value for item in answers], answers[0].answer, total.queries.cost, len(answers.failures))
    removed: list[str] = await reap("local", older_than=600, dry_run=True)
    print(steps, answer.answer, answer.queries.cost, removed)


try:
    print(asyncio.run(run_batches()))
except ExecutionsFailed as failed:
    failures: Sequence[Failure] = failed.failures
    kept: list[Result] = [outcome for outcome in failed.results if isinstance(outcome, Result)]
    print(failed.results_path, kept, [failure.error.summary for failure in failures])
except ConfigurationError as error:
    print(error.text)

with LocalInterpreter(isolation="landlock", memory_mib=512, environment={"A": "b"}, timeout=60) as interpreter:
    first: Result = interpreter.execute("SUBMIT(x=factor)", {"factor": 2})
    print(first.x, interpreter.execute(double, {"x": 2}).output)
    heard: list[tuple[str, str]] = []
    interpreter.execute("print(1)", on_output=lambda stream, text: heard.append((stream, text)))
    interpreter.upload("notes.txt", Path("notes.txt"))
    interpreter.upload("notes.txt", "text")
    size = len(interpreter.download("notes.txt"))
    interpreter.reset()


async def run_steps() -> bytes:
    async with open_rlm("openai/gpt-4o-mini", LocalSandbox(), output_type=int, max_cost=1, timeout=None) as session:
        reply: SessionAnswer = await session.ask("how many?", context={"a": 1})
        print(reply.value, reply.text, session.queries.cost)
    async with AsyncLocalInterpreter(memory_mib=512, tools={"double": double}) as interpreter:
        first: Result = await interpreter.execute(double_later, {"x": 2}, on_output=print)
        await interpreter.reset()
        await interpreter.upload("notes.txt", str(first.output))
        return await interpreter.download("notes.txt")


other = AsyncDaytonaInterpreter(api_key="key", timeout=None)
daytona = DaytonaInterpreter(api_key="key", packages=["numpy"], tools={"double": double})
modal = ModalInterpreter(gpu="T4", token_id="id", token_secret="secret", prepare="import math")
factories = InterpreterFactory(LocalInterpreter), InterpreterFactory(lambda: LocalInterpreter(timeout=60))
content: bytes = Volume("results").get("notes.txt")
LocalSandbox(memory_mib=512, environment={"A": SecretStr("b")}).save("narrow", overwrite=True)
LanguageModel(model="openai/gpt-4o-mini", api_key=SecretStr("key")).save("small")

five: Result = LocalSandbox().run("SUBMIT(x=factor)", {"factor": 5})

in_sync: SweepReport = sweep.sync("SUBMIT(loss=1)", grid={"rate": [1, 2]}, objective="loss", max_workers=2)
in_turn: Sequence[Result | Failure] = batch.sync(["SUBMIT(x=1)"], on_failure="return")
print(in_sync.best.loss, in_turn, chunks.sync("SUBMIT(n=1)", data=[1], chunk_size=1)["0"].n)


@flow
async def run_single_executions() -> list[int]:
    one: Result = await run_code("SUBMIT(x=n)", {"n": 1}, timeout=60)
    return [one.x, *(result.x for result in await asyncio.gather(run_code("SUBMIT(x=1)"), run_code("SUBMIT(x=2)")))]


patient = batch.with_options(retries=2, timeout_seconds=60)
again: Sequence[Result | Failure] = asyncio.run(patient("SUBMIT(x=1)", max_workers=2))
batch.serve("nightly", cron="0 3 * * *", parameters={"code": "SUBMIT(x=1)"})
"""

# The checker's message for a line contains the text after `# wrong: `.
WRONG = """
import asyncio

from rlm_batch import LocalInterpreter, LocalSandbox
from rlm_batch import ExecutionsFailed
from rlm_batch import RlmAnswer, batch, chunks, reap, rlm, run_code, sequence, sweep
from rlm_batch import no_such_name  # wrong: no_such_name


async def main() -> None:
    await batch("SUBMIT(x=1)", max_worker=8)  # wrong: max_worker
    await batch("SUBMIT(x=1)", on_failure="retrun")  # wrong: on_failure
    await batch("SUBMIT(x=1)", [{"a": 1}], provider=3)  # wrong: provider
    await batch(
        "SUBMIT(x=1)",
        timeout="long",  # wrong: timeout
        retries=1,
    )
    await batch(3)  # wrong: __call__
    await batch()  # wrong: code
    await batch("SUBMIT(x=1)", inputs={"a": 1})  # wrong: inputs
    await batch("SUBMIT(x=1)", inputs={"a": 1}.values())  # wrong: inputs
    await sweep("SUBMIT(x=1)", direction="minimise")  # wrong: direction
    await sweep("SUBMIT(x=1)", ["rate"])  # wrong: list[str]
    await chunks("SUBMIT(x=1)", data=[1], chunk_size="ten")  # wrong: chunk_size
    await sequence(["SUBMIT(x=1)"], max_workers=2)  # wrong: max_workers
    await rlm("how many?")  # wrong: __call__
    await rlm(["how many?"], "openai/gpt-4o-mini")  # wrong: __call__
    answers: RlmAnswer = await rlm(queries=["a", "b"], language_model="openai/gpt-4o-mini")  # wrong: RlmAnswers
    print(answers)
    rlm.stream("how many?")  # wrong: stream
    await rlm("q", "m", on_turn=7)  # wrong: __call__
    await reap(older="600")  # wrong: older
    texts: list[str] = await batch("SUBMIT(x=1)")  # wrong: list[str]
    report = await sweep("SUBMIT(x=1)")
    print(texts, report.bets)  # wrong: bets
    number: int = report.best  # wrong: int
    results = batch("SUBMIT(x=1)")
    print(number, results[0])  # wrong: Coroutine
    await batch.with_options(retries=2)(3)  # wrong: __call__
    answer: str = await run_code("SUBMIT(x=1)")  # wrong: Result
    print(answer)


try:
    asyncio.run(main())
except ExecutionsFailed as failed:
    failed_texts: list[str] = failed.failures  # wrong: Sequence[Failure]
    print(failed_texts)
sweep.sync("SUBMIT(x=1)", direction="minimise")  # wrong: direction
sync_texts: list[str] = batch.sync(["SUBMIT(x=1)"])  # wrong: list[str]
print(sync_texts)
LocalInterpreter(timeout="long")  # wrong: timeout
LocalSandbox(memory_mib="much")  # wrong: memory_mib
LocalSandbox(memory_mb=512)  # wrong: memory_mb
with LocalInterpreter() as interpreter:
    text: str = interpreter.execute("SUBMIT(x=1)")  # wrong: Result
    print(text, interpreter.execute(1))  # wrong: execute
    interpreter.execute("1", on_output=lambda text: None)  # wrong: on_output
    interpreter.upload("x", 3)  # wrong: upload
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `right.py` and `wrong.py`, next to an environment in which the package is installed."""
    folder = tmp_path_factory.mktemp("types")
    # A type checker does not run the finder of an editable install. The link replaces it, at the place where a wheel
    # would install the package.
    environment = folder / "environment"
    venv.create(environment)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment / "lib" / version / "site-packages"
    (packages / "rlm_batch").symlink_to(Path(rlm_batch.__file__).parent)
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    mine = folder / "mine"
    mine.mkdir()
    (mine / "right.py").write_text(RIGHT)
    (mine / "wrong.py").write_text(WRONG)
    (mine / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    return mine


def run_checker(folder: Path, *command: str) -> str:
    """Run a type checker on both programs and return what it prints."""
    python = str(folder.parent / "environment" / "bin" / "python")
    words = [sys.executable, "-m", *command, python, "right.py", "wrong.py"]
    # The checker gets its settings from the command line only.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MYPY", "PYTHONPATH"))}
    done = run_program(words, cwd=folder, env=environment, timeout=590)
    assert done.returncode == 1, done.stdout + done.stderr  # the checker found errors and did not crash
    return done.stdout


def check_findings(findings: list[tuple[str, int, str]]) -> None:
    """Fail unless the findings are exactly the wrong lines of `wrong.py`, each with its expected text.

    A finding is a file name, a line number from 1 and a message.
    """
    assert [finding for finding in findings if finding[0] != "wrong.py"] == []
    line_numbers: dict[int, str] = {}
    for _, line, message in findings:
        line_numbers[line] = line_numbers.get(line, "") + message
    lines = enumerate(WRONG.split("\n"), 1)
    expected = {number: line.partition("# wrong: ")[2] for number, line in lines if "# wrong: " in line}
    assert line_numbers.keys() == expected.keys(), line_numbers
    assert {line: message for line, message in line_numbers.items() if expected[line] not in message} == {}


@pytest.mark.full
def test_pyright_reports_exactly_the_wrong_lines(programs: Path) -> None:
    report: dict[str, Any] = json.loads(run_checker(programs, "basedpyright", "--outputjson", "--pythonpath"))
    check_findings(
        [
            (Path(diagnostic["file"]).name, diagnostic["range"]["start"]["line"] + 1, diagnostic["message"])
            for diagnostic in report["generalDiagnostics"]
        ]
    )


@pytest.mark.full
def test_mypy_reports_exactly_the_wrong_lines(programs: Path) -> None:
    settings = ("--strict", "--config-file=", f"--cache-dir={programs}/cache", "--output=json", "--python-executable")
    printed = run_checker(programs, "mypy", *settings)
    diagnostics: list[dict[str, Any]] = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    check_findings(
        [(item["file"], item["line"], item["message"]) for item in diagnostics if item["severity"] == "error"]
    )
