"""The project's flows and tasks, called from users' flows, tasks and scripts."""

import asyncio
import pickle
import sys
import tempfile
from pathlib import Path
from textwrap import dedent
from typing import Any

import cloudpickle
import pandas
import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter
from prefect.utilities.callables import parameter_schema

from rlm_batch import (
    CodeError,
    ConfigurationError,
    LocalSandbox,
    RunReport,
    SandboxLost,
    batch,
    chunks,
    load_report,
    run_code,
    sweep,
)

from ...infra.deployed import Deployed
from ...infra.programs import run_program
from ...infra.waiting import wait_until_async

LOSS = "SUBMIT(loss=(x - 1) ** 2)"
GRID = {"x": [0, 1, 2]}


def test_sync_flows_and_tasks_get_the_report():
    @task
    def run_in_a_task() -> int:
        return batch.sync(["SUBMIT(y=2)"])[0].y

    @flow
    def tune() -> tuple[int, int]:
        return sweep.sync(LOSS, GRID, objective="loss").best.loss, run_in_a_task.submit().result()

    assert tune() == (0, 2)


@pytest.mark.anyio
async def test_sync_in_a_running_loop_is_refused_with_a_hint_to_await():
    with pytest.raises(ConfigurationError, match=r"write `await sweep\(\.\.\.\)`"):
        sweep.sync(LOSS, GRID)


def test_a_sync_flow_runs_the_task_by_sync():
    @flow
    def draw() -> list[int]:
        return [run_code.sync("SUBMIT(y=x)", {"x": x}).y for x in range(2)]

    assert draw() == [0, 1]
    assert run_code.with_options(retries=0).sync("SUBMIT(y=3)").y == 3


@pytest.mark.anyio
async def test_the_tasks_sync_in_a_running_loop_is_refused_with_a_hint_to_await():
    with pytest.raises(ConfigurationError, match=r"write `await run_code\(\.\.\.\)`"):
        run_code.sync("SUBMIT()")


def test_futures_are_resolved_as_in_prefects_own_flows():
    @task
    def list_rows() -> list[dict[str, int]]:
        return [{"x": 1}, {"x": 2}]

    @task
    async def make_row(x: int) -> dict[str, int]:
        return {"x": x}

    @task
    def fail() -> list[dict[str, int]]:
        raise ValueError("no rows today")

    @flow
    def run_sync() -> list[list[int]]:
        sources: list[Any] = [list_rows.submit(), make_row.map([3, 4]), [make_row.submit(5), {"x": 6}]]
        return [[result.y for result in batch.sync("SUBMIT(y=x)", source)] for source in sources]

    @flow
    async def run_async() -> list[int]:
        rows: Any = list_rows.submit()
        return [result.y for result in await batch("SUBMIT(y=x)", inputs=rows)]

    @flow
    def run_failed() -> None:
        rows: Any = fail.submit()
        batch.sync("SUBMIT(y=x)", rows)

    assert run_sync() == [[1, 2], [3, 4], [5, 6]]
    assert asyncio.run(run_async()) == [1, 2]
    with pytest.raises(ValueError, match="no rows today"):
        run_failed()


def test_help_shows_types_without_the_bounds_of_prefects_form(capsys: pytest.CaptureFixture[str]):
    help(batch)
    text = capsys.readouterr().out
    assert "max_workers: int = 4" in text
    assert "inputs: list[dict[str, typing.Any]] | str | None = None" in text
    assert "Annotated" not in text
    assert parameter_schema(batch).properties["max_workers"]["minimum"] == 1


def test_an_unawaited_call_warns_and_names_await_and_sync():
    call = sweep(LOSS, GRID)
    with pytest.warns(RuntimeWarning, match=r"write await sweep\(\.\.\.\), or sweep\.sync\(\.\.\.\)"):
        del call


def test_a_flow_is_pickled_by_its_name_and_keeps_its_options():
    assert pickle.loads(pickle.dumps(sweep)) is sweep
    assert pickle.loads(cloudpickle.dumps(sweep)) is sweep
    patient = batch.with_options(name="patient", retries=3)
    loaded = pickle.loads(cloudpickle.dumps(patient.with_options(timeout_seconds=60)))
    assert (type(loaded), loaded.name, loaded.retries, loaded.timeout_seconds) == (type(batch), "patient", 3, 60)
    assert loaded.sync(["SUBMIT(y=1)"])[0].y == 1


def test_saved_and_unsaved_blocks_are_providers():
    LocalSandbox(memory_mib=512).save("narrow", overwrite=True)
    code = "import resource\nSUBMIT(mib=resource.getrlimit(resource.RLIMIT_AS)[0] >> 20)"
    saved: Any = LocalSandbox.load("narrow")
    for provider, mib in ((saved, 512), (LocalSandbox(memory_mib=768), 768)):
        assert batch.sync([code], provider=provider)[0].mib == mib
    secret = LocalSandbox(environment={"KEY": "s3cret"})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"would show its environment: save it"):
        batch.sync(["SUBMIT(y=1)"], provider=secret)


def test_reports_convert_to_data_frames_and_notebook_tables():
    report = sweep.sync("SUBMIT(loss=1 / x, note='<b>')", {"x": [0, 1, 2]}, objective="loss", on_failure="return")
    frame = report.to_dataframe()
    assert list(frame["x"]) == [0, 1, 2]
    assert frame["loss"].isna().tolist() == [True, False, False]
    assert list(frame["status"]) == ["failed", "succeeded", "succeeded"]
    assert frame["error"][0] == "CodeError"
    assert frame["seconds"].min() > 0
    assert set(frame["attempt"]) == {1}
    page = report._repr_html_()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "best" in page
    cut = chunks.sync("SUBMIT(n=len(data))", data=[1, 2, 3], chunk_size=2)
    assert isinstance(cut.to_dataframe(), pandas.DataFrame)
    assert list(cut.to_dataframe()["n"]) == [2, 1]
    assert "<table>" in cut._repr_html_()


def test_a_finished_run_is_read_by_id_name_or_path(results: Path):
    report = sweep.sync(LOSS, GRID, objective="loss")
    by_path = load_report(report.results_path)
    by_id = load_report(Path(report.results_path).name)
    by_name = load_report(by_path.name)
    for each_report in (by_path, by_id, by_name):
        assert isinstance(each_report, RunReport)
        assert (each_report.flow, each_report.objective, each_report.best.meta.variables) == (
            "rlm-sweep",
            "loss",
            {"x": 1},
        )
        assert [outcome.meta.index for outcome in each_report.results] == [0, 1, 2]
        assert each_report.to_dataframe().shape[0] == 3
    assert str(by_path).splitlines()[2].endswith("best")
    with pytest.raises(ConfigurationError, match="there is no run 'nobody'"):
        load_report("nobody")


@pytest.mark.anyio
async def test_a_run_reports_its_results_in_its_state_and_an_event(results: Path):
    state: Any = await sweep(LOSS, GRID, objective="loss", return_state=True)  # type: ignore[reportCallIssue]
    path = state.message.rpartition("results in ")[2]
    assert state.message == f"3 of 3 trials succeeded; best loss 0 in trial 1 with x=1; results in {path}"
    event = await find_event("rlm-batch.run.completed", Path(path).name)
    assert event.payload["best"] == {"index": 1, "value": 0, "variables": {"x": 1}, "fields": {"loss": 0}}
    assert (event.payload["succeeded"], event.payload["results_path"]) == (3, path)


@pytest.mark.anyio
async def test_a_deployment_run_that_fails_before_its_job_opens_sends_an_event():
    deployed = await Deployed.made(code="SUBMIT(x=x)", inputs="/not/allowed.csv")
    assert (await deployed.execute()).is_failed()
    event = await find_event("rlm-batch.run.failed", str(deployed.run.id))
    assert event.payload == {"flow": "rlm-batch", "name": deployed.run.name, "best": None}


async def find_event(name: str, run: str) -> Any:
    """Return the event of that name of a flow run, once the server has it."""
    wanted = EventFilter(event=EventNameFilter(name=[name]), resource=EventResourceFilter(id=[f"rlm-batch.run.{run}"]))
    async with get_client() as client:

        async def find_events() -> list[Any]:
            return (await client.read_events(filter=wanted, limit=1)).events

        (event,) = await wait_until_async(find_events, name)
    return event


def test_tasks_run_concurrently_without_blocking_the_event_loop(results: Path, tmp_path: Path):
    (meeting := tmp_path / "meeting").mkdir()
    # Each execution waits for all others, so a blocked event loop would hang the test.
    code = f"""
import os, time
open({str(meeting)!r} + f"/{{n}}", "w").close()
while len(os.listdir({str(meeting)!r})) < 4:
    time.sleep(0.02)
SUBMIT(n=n)
"""

    @flow
    async def ask() -> list[int]:
        calls = (run_code(code, {"n": n}, provider="local:none") for n in range(4))
        return [result.n for result in await asyncio.gather(*calls)]

    assert asyncio.run(ask()) == [0, 1, 2, 3]
    (ledger,) = [path for path in results.iterdir() if path.name != "inputs"]
    report = load_report(str(ledger))
    assert [outcome.meta.index for outcome in report.results] == [0, 1, 2, 3]
    assert {outcome.meta.variables["n"] for outcome in report.results} == {0, 1, 2, 3}
    assert report.flow == "ask"


def test_the_task_can_be_mapped_and_submitted_in_a_sync_flow():
    @flow
    def draw() -> list[float]:
        futures: Any = run_code.map(["import random\nSUBMIT(x=random.random())"] * 3)
        return [future.result().x for future in futures]

    assert len(set(draw())) == 3


def test_the_task_retries_listed_errors_and_code_only_on_request(tmp_path: Path):
    tries: list[str] = []
    unset: Any = None
    attempt = LocalSandbox.open

    async def lose_the_first(self: LocalSandbox, labels: dict[str, str]) -> Any:
        tries.append("opened")
        if len(tries) == 1:
            raise SandboxLost("it has gone")
        return await attempt(self, labels)

    @flow
    async def run() -> tuple[int, int]:
        quick = run_code.with_options(retries=2, retry_delay_seconds=0)
        first = await quick("SUBMIT(y=1)", provider="local:none", idempotent=unset)
        code = "import os\ntry: os.mkdir(path)\nexcept FileExistsError: SUBMIT(y=2)\nraise OSError"
        with pytest.raises(CodeError):
            await quick(code, {"path": str(tmp_path / "once")}, provider="local:none")
        again = await quick(code, {"path": str(tmp_path / "two")}, provider="local:none", retry_code_errors=True)
        return first.meta.attempt, again.meta.attempt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlm_batch.blocks.local.provider.LocalProvider.open", lose_the_first)
        assert asyncio.run(run()) == (2, 2)


POOLED = """
    import asyncio, sys
    from prefect import flow, task
    from rlm_batch import LocalInterpreter, batch, run_code, sweep

    @task
    def tune(n):
        return sweep.sync("SUBMIT(loss=(x - 1) ** 2)", {"x": list(range(n))}, objective="loss").best.loss

    @task
    def describe(result):
        return dict(result)

    def make_runner():
        if sys.argv[1] == "dask":
            from prefect_dask import DaskTaskRunner
            return DaskTaskRunner(cluster_kwargs={"n_workers": 1, "threads_per_worker": 2, "dashboard_address": None})
        if sys.argv[1] == "ray":
            from prefect_ray import RayTaskRunner
            return RayTaskRunner(init_kwargs={"num_cpus": 2, "include_dashboard": False, "object_store_memory": 2**27})
        from prefect.task_runners import ProcessPoolTaskRunner
        return ProcessPoolTaskRunner(max_workers=2)

    if __name__ == "__main__":
        @flow(task_runner=make_runner())
        def run():
            tuned = [tune.submit(n) for n in (2, 3)]
            one = run_code.submit("SUBMIT(y=4)")
            return [future.result() for future in tuned], describe.submit(one).result()

        print(run())
"""


@pytest.mark.full
@pytest.mark.parametrize("runner", ["processes", "dask", pytest.param("ray", marks=pytest.mark.requires("ray"))])
def test_tasks_of_other_task_runners_can_use_our_flows_and_results(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "pooled.py").write_text(dedent(POOLED))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # a short path, for Ray's sockets
        monkeypatch.setenv("RAY_TMPDIR", short)
        command = [sys.executable, "pooled.py", runner]
        done = None
        for _ in range(3):  # Ray gives up after 30 s if a busy machine starts its processes slowly.
            done = run_program(command, cwd=tmp_path, timeout=280)
            if "timed out during startup" not in done.stderr:
                break
    assert done is not None
    assert done.returncode == 0, done.stderr[-3000:]
    assert "([0, 0], {'y': 4})" in done.stdout.splitlines()
