"""What a person gets from the batch flow."""

import json
import math
import re
from pathlib import Path

import pytest
from pydantic import SecretStr

from rlm_batch import (
    CodeCrashed,
    CodeError,
    CodeSyntaxError,
    ConfigurationError,
    DaytonaSandbox,
    DeadlineExceeded,
    ExecutionsFailed,
    ExecutionTimeout,
    Failure,
    LocalSandbox,
    Result,
    SubmitError,
    batch,
)

from .conftest import OutputListener, becomes, last_run

pytestmark = pytest.mark.anyio

THREE = [
    "result = sum(range(1000)); SUBMIT(total=result)",
    "import math; SUBMIT(pi_approx=math.pi)",
    "SUBMIT(greeting='Hello from a sandbox')",
]
FAILING = {
    "raise ValueError('no such thing')": (CodeError, "no such thing"),
    "x = (": (CodeSyntaxError, "not valid Python"),
    "import os; os._exit(3)": (CodeCrashed, "exited with status 3"),
    "import ctypes; ctypes.string_at(0)": (CodeCrashed, "SIGSEGV"),
    "import time; time.sleep(60)": (ExecutionTimeout, "timeout of 3 s"),
    "SUBMIT(x=1j)": (SubmitError, "x is a complex"),
    "SUBMIT(x='y' * 2**21)": (SubmitError, "save_to_volume"),
}


async def test_results_come_back_in_order_and_are_read_as_attributes():
    total, pi, greeting = await batch(THREE, max_workers=3)
    assert (total.total, pi.pi_approx, greeting.greeting) == (499500, 3.141592653589793, "Hello from a sandbox")
    assert [result.meta.index for result in (total, pi, greeting)] == [0, 1, 2]


@pytest.mark.parametrize("reuse", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_each_failure_is_its_own_error_and_the_others_finish(reuse):
    code = [text for failing in FAILING for text in (failing, "SUBMIT(fine=True)")]
    results = await batch(code, timeout=3, on_failure="return", reuse_sandboxes=reuse, max_workers=2)
    assert [result.fine for result in results[1::2]] == [True] * len(FAILING)
    for failure, (kind, message) in zip(results[::2], FAILING.values(), strict=True):
        assert isinstance(failure, Failure)
        assert type(failure.error) is kind
        assert message in str(failure.error)


@pytest.mark.full
async def test_memory_without_end_is_out_of_memory_and_the_next_execution_works(results):
    from rlm_batch import LocalSandbox

    await LocalSandbox(memory_mib=256).save("small", overwrite=True)  # type: ignore[misc]
    code = ["x = []\nwhile True: x.append(bytearray(10**6))", "SUBMIT(fine=1)"]
    first, second = await batch(
        code, provider="local-sandbox/small", max_workers=1, reuse_sandboxes=True, on_failure="return"
    )
    assert isinstance(first.error, CodeCrashed)
    assert first.error.out_of_memory
    assert second.fine == 1


async def test_failures_are_raised_when_all_are_done_with_everything_that_was_got():
    with pytest.raises(ExecutionsFailed, match="1 of 3 executions failed") as raised:
        await batch(["SUBMIT(a=1)", "1/0", "SUBMIT(a=3)"])
    first, failure, third = raised.value.results
    assert (first.a, third.a) == (1, 3)
    assert raised.value.failures == [failure]
    assert "ZeroDivisionError" in str(failure.error)
    assert len(list(Path(raised.value.results_path).glob("part-*.jsonl"))) >= 1


async def test_one_piece_of_code_runs_over_inputs_from_a_list_and_from_files(tmp_path):
    code = "SUBMIT(y=x * 2, kind=type(x).__name__)"
    lines, cells = tmp_path / "in.jsonl", tmp_path / "in.csv"
    lines.write_text('{"x": 1}\n\n{"x": "a"}\n')
    cells.write_text("x\n1\na\n")
    lists = await batch(code, [{"x": 1}, {"x": "a"}]), await batch(code, str(lines))
    for one, text in (*lists, await batch(code, str(cells), types="json")):
        assert (one.y, text.y, one.kind, text.kind) == (2, "aa", "int", "str")


@pytest.mark.full
async def test_a_file_of_csv_is_read_as_its_job_began_to_read_it_and_nothing_runs_again(tmp_path):
    cells, results = tmp_path / "in.csv", tmp_path / "results" / "job"
    code = "import os\nSUBMIT(x=x, zip=zip, random=os.urandom(8).hex())"
    cells.write_text("x,zip\n1,01234\n2.5,56789\n")
    first = await batch(code, str(cells), results_path=str(results))
    assert [(result.x, result.zip) for result in first] == [(1.0, "01234"), (2.5, "56789")]
    cells.write_text("x,zip\n1,01234\n2.5,56789\n3,98765\n")
    again = await batch(code, str(cells), results_path=str(results))
    assert [result.random for result in again[:2]] == [result.random for result in first]
    cells.write_text("x,zip\n1,01234\nmany,56789\n")
    with pytest.raises(ConfigurationError, match=r"line 3 of .*, column 'x': 'many' is no float"):
        await batch(code, str(cells), results_path=str(results))
    records = [json.loads(path.read_text()) for path in results.glob("run-*.json")]
    assert [record["column_types"] for record in records] == [{"x": "float", "zip": "str"}] * 2


@pytest.mark.full
@pytest.mark.parametrize("has_record", [True, False], ids=["with a record", "before there were records"])
async def test_a_job_of_a_version_that_knew_no_types_goes_on_with_nothing_run_again(tmp_path, has_record):
    cells, results = tmp_path / "in.csv", tmp_path / "results" / "job"
    code = "import os\nSUBMIT(kind=type(x).__name__, random=os.urandom(8).hex())"
    cells.write_text("x\n1\n01234\n2.5\n\ntrue\n")
    first = await batch(code, str(cells), types="json", results_path=str(results))
    assert [result.kind for result in first] == ["int", "str", "float", "bool"]
    (record,) = results.glob("run-*.json")
    if has_record:
        record.write_text(json.dumps({k: v for k, v in json.loads(record.read_text()).items() if k != "column_types"}))
    else:
        record.unlink()
    again = await batch(code, str(cells), results_path=str(results))
    assert [result.random for result in again] == [result.random for result in first]
    cached = await batch(code, str(cells), types="json", cache_results=True)
    assert [result.random for result in cached] == [result.random for result in first]


async def test_a_cell_of_csv_may_be_long_and_what_is_almost_json_is_text(tmp_path):
    (tmp_path / "in.csv").write_text(f'x\n{"a" * 200_000}\n"[NaN, 1]"\n{"[" * 100_000}\n')
    long, almost, nested = await batch("SUBMIT(size=len(x), kind=type(x).__name__)", str(tmp_path / "in.csv"))
    assert (long.size, almost.size, nested.size) == (200_000, 8, 100_000)
    assert {long.kind, almost.kind, nested.kind} == {"str"}


async def test_long_code_may_have_any_letters():
    code = [f"# {'x' * 300_000}\nSUBMIT(text='a\u2028b\x85c')", "SUBMIT(text='second')"]
    assert [result.text for result in await batch(code)] == ["a\u2028b\x85c", "second"]


async def test_two_identical_executions_are_two_executions():
    first, second = await batch(["import os; SUBMIT(random=os.urandom(8).hex())"] * 2)
    assert first.random != second.random


async def test_inputs_beyond_what_prefect_takes_as_parameters_go_by_a_file():
    inputs = [{"text": str(number) * 200_000} for number in range(4)]
    results = await batch("SUBMIT(size=len(text), first=text[0])", inputs)
    assert [(result.size, result.first) for result in results] == [(200_000, str(number)) for number in range(4)]
    code = [f"# {'x' * 300_000}\nSUBMIT(n={number})" for number in range(3)]
    assert [result.n for result in await batch(code)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"code": []}, "empty"),
        ({"code": ["1"], "inputs": [{"x": 1}]}, "one piece of code"),
        ({"code": "train.py", "inputs": [{"x": 1}]}, r"'train.py', the name of a file.*Path\('train.py'\).read_text"),
        ({"code": ["SUBMIT()", "~/runs/train-2.py\n"]}, "the name of a file"),
        ({"code": "1", "inputs": []}, "empty"),
        ({"code": "1", "inputs": "nosuch.jsonl"}, "No such file"),
        ({"code": "1", "inputs": "nosuch.xlsx"}, "neither JSON lines"),
        ({"code": "1", "provider": "nosuch"}, "unknown provider"),
        ({"code": "1", "provider": "local:nosuch"}, "unknown isolation"),
        ({"code": "1", "provider": "local-sandbox/nosuch"}, "no block local-sandbox/nosuch"),
        ({"code": "1", "results_path": "/proc/nosuch"}, "results_path"),
    ],
)
async def test_bad_input_is_one_sentence_before_anything_runs(parameters, message):
    with pytest.raises(ConfigurationError, match=message) as raised:
        await batch(**parameters)
    assert "\n" not in str(raised.value)


async def test_a_parameter_that_there_is_not_is_refused_with_the_flows_name():
    with pytest.raises(TypeError, match=r"batch\(\) got an unexpected keyword argument 'max_worker'"):
        await batch(THREE, max_worker=3)  # type: ignore[reportCallIssue]


async def test_max_workers_below_one_is_refused():
    with pytest.raises(Exception, match="max_workers"):
        await batch("1", max_workers=0)


async def test_a_variable_that_is_no_name_fails_its_own_execution_only():
    good, bad = await batch("SUBMIT(x=1)", [{"x": 1}, {"not a name": 1}], on_failure="return")
    assert good.x == 1
    assert isinstance(bad.error, ConfigurationError)
    assert "not a name" in str(bad.error)


async def test_the_ledger_has_a_line_for_each_execution_with_what_it_is_read_for(tmp_path):
    path = tmp_path / "ledger"
    await batch("SUBMIT(y=1 // x)", [{"x": 1}, {"x": 0}], results_path=str(path), on_failure="return")
    lines = [json.loads(line) for part in path.glob("part-*.jsonl") for line in part.read_text().splitlines()]
    good, bad = sorted(lines, key=lambda line: line["index"])
    assert (good["version"], good["status"], good["outputs"], good["attempt"]) == (1, "succeeded", {"y": 1}, 1)
    assert (bad["status"], bad["error"]["error"], bad["error"]["type"]) == ("failed", "CodeError", "ZeroDivisionError")
    assert (good["meta"]["variables"], good["meta"]["isolation"]) == ({"x": 1}, bad["meta"]["isolation"])
    assert good["key"] != bad["key"]


async def test_a_run_on_a_ledger_with_a_damaged_line_runs_that_execution_again(tmp_path):
    code = "import os; SUBMIT(random=os.urandom(8).hex())"
    first = await batch([code, code], results_path=str(tmp_path))
    (part,) = tmp_path.glob("part-*.jsonl")
    lines = [json.loads(line) for line in part.read_text().splitlines()]
    damaged = [{**line, "meta": 5} if line["index"] == 0 else line for line in lines]
    part.write_text("".join(json.dumps(line) + "\n" for line in damaged))
    again = await batch([code, code], results_path=str(tmp_path))
    assert again[0].random != first[0].random
    assert again[1].random == first[1].random


async def test_cached_results_serve_another_run_and_replicates_stay_apart():
    code = "import os; SUBMIT(random=os.urandom(8).hex())"
    first = await batch([code, code, code], cache_results=True)
    again = await batch([code, code, code, code], cache_results=True)
    assert [result.random for result in first] == [result.random for result in again[:3]]
    assert len({result.random for result in again}) == 4
    fresh = await batch([code, code, code])
    assert not {result.random for result in fresh} & {result.random for result in first}
    changed = await batch([code + "\n"], cache_results=True)
    assert changed[0].random not in {result.random for result in first}


async def test_a_deadline_ends_what_runs_and_keeps_what_is_done():
    code = "import time; time.sleep(x); SUBMIT(x=x)"
    inputs = [{"x": 0}, {"x": 60}, {"x": 61}]
    done, *late = await batch(code, inputs, max_workers=1, deadline=10, on_failure="return")
    assert done.x == 0
    assert [type(failure.error) for failure in late] == [DeadlineExceeded, DeadlineExceeded]
    assert "deadline of 10 s" in str(late[0].error)


async def test_reused_sandboxes_are_as_many_as_the_workers_and_others_one_each():
    code = ["import os; SUBMIT(pid=os.getpid())"] * 6
    reused = await batch(code, max_workers=2, reuse_sandboxes=True)
    assert len({result.meta.sandbox_id for result in reused}) <= 2
    fresh = await batch(code, max_workers=2)
    assert len({result.meta.sandbox_id for result in fresh}) == 6


async def test_a_reused_sandbox_whose_supervisor_is_killed_is_replaced():
    code = ["import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(9)", "SUBMIT(fine=True)"]
    lost, fine = await batch(code, provider="local:none", max_workers=1, reuse_sandboxes=True, on_failure="return")
    assert type(lost.error).__name__ == "OutcomeUnknown"
    assert fine.fine


async def test_the_server_shows_a_run_for_each_execution_with_its_state_tags_and_attempts(server):
    from prefect import get_client
    from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter

    await batch(["SUBMIT(a=1)", "1/0"], on_failure="return")
    tasks = []
    async with get_client() as client:

        async def show_their_states() -> bool:
            run = await last_run(client)
            mine = FlowRunFilter(id={"any_": [run.id]})  # type: ignore[arg-type]
            tasks[:] = await client.read_task_runs(flow_run_filter=mine, task_run_filter=TaskRunFilter())
            return {task.name: task.state_name for task in tasks} == {
                "execution 0": "Completed",
                "execution 1": "Failed",
            }

        await becomes(show_their_states)
        assert {"sandbox", "sandbox:local"} <= set(tasks[0].tags)


@pytest.mark.full
async def test_prefects_tag_limits_hold_executions_and_are_not_asked_for_where_there_are_none(server, monkeypatch):
    from prefect.client.orchestration import PrefectClient, get_client
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

    asked: list[list[str]] = []
    take = PrefectClient.increment_concurrency_slots_with_lease

    async def counted(self, names, *args, **options):
        asked.append(names)
        return await take(self, names, *args, **options)

    monkeypatch.setattr(PrefectClient, "increment_concurrency_slots_with_lease", counted)
    code = "import time; begun = time.time(); time.sleep(0.2); SUBMIT(begun=begun, ended=time.time())"
    await batch([code, code], max_workers=2)
    assert asked == []
    limit = GlobalConcurrencyLimitCreate(name="tag:sandbox:local", limit=1)
    async with get_client() as client:
        await client.create_global_concurrency_limit(limit)
        try:
            first, second = sorted(await batch([code, code], max_workers=2), key=lambda result: result.begun)
        finally:
            await client.delete_global_concurrency_limit_by_name(limit.name)
    assert asked
    assert first.ended <= second.begun


def test_parameters_have_descriptions_and_bounds_for_the_form_in_the_ui():
    schema = batch.parameters.model_dump()["properties"]
    assert schema["max_workers"]["minimum"] == 1
    assert all(schema[name].get("description") for name in schema)


async def test_cancelling_the_flow_ends_promptly_and_leaves_no_sandbox_and_its_task_runs_are_cancelled(caplog):
    import asyncio

    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    async with get_client() as client:
        code, output = "import time; print('begun', flush=True); time.sleep(60)", OutputListener()
        inputs = [{"i": i} for i in range(6)]
        task = asyncio.create_task(batch.with_listener(output)(code, inputs, max_workers=2))

        async def are_two(name: str) -> bool:
            mine = FlowRunFilter(id=FlowRunFilterId(any_=[(await last_run(client)).id]))
            runs = await client.read_task_runs(flow_run_filter=mine)
            return [run.state.name for run in runs if run.state] == [name, name]

        await output.wait_for(2)
        await becomes(lambda: are_two("Running"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(30):  # the code alone would take sixty
                await task
        await becomes(lambda: are_two("Cancelled"))
    assert "Finished in state Cancelled" not in caplog.text


def test_a_result_says_what_is_there_when_asked_for_what_is_not():
    from rlm_batch.sandbox.meta import Meta

    with pytest.raises(AttributeError, match="submitted loss"):
        Result({"loss": 1}, Meta(submitted=True)).loos  # noqa: B018


async def test_settings_of_the_provider_are_given_for_a_run_without_a_saved_block():
    code = "import resource\nSUBMIT(mib=resource.getrlimit(resource.RLIMIT_AS)[0] >> 20, volume=VOLUME is not None)"
    options = {"memory_mib": "300", "volume_name": "notes"}
    (result,) = await batch([code], provider_options=options)
    assert result.outputs == {"mib": 300, "volume": True}
    (result,) = await batch([code])
    assert result.outputs == {"mib": 4096, "volume": False}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 300}, "the provider local has no option 'memory': did you mean memory_mib?"),
        ({"memory_mib": 3}, "memory_mib: Input should be greater than or equal to 64"),
        pytest.param({"memory_mib": "much"}, "memory_mib: Input should be a valid integer", marks=pytest.mark.full),
        ({"packages": ["git+https://host/x"]}, "packages"),
        ({"repo_token": "hidden"}, "repo_token is no option of a single run: it is a secret"),
        ({"environment": {"KEY": "hidden"}}, "environment is no option of a single run"),
        pytest.param({"max_sandboxes": 50}, "max_sandboxes is no option of a single run", marks=pytest.mark.full),
        ({"isolation": "none"}, "isolation is no option of a single run"),
        pytest.param({"cpus": math.inf}, "cpus: Input should be a finite number", marks=pytest.mark.full),
        pytest.param({"memory_mib": 10**19}, "MiB are more than a system can count", marks=pytest.mark.full),
    ],
)
async def test_settings_that_the_provider_has_not_are_one_sentence(options, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)) as caught:
        await batch(["SUBMIT()"], provider_options=options)
    assert "hidden" not in str(caught.value)


async def test_where_a_blocks_secrets_go_is_no_option_of_a_run(server):
    secret = SecretStr("hidden")
    with_token = LocalSandbox(repo_url="https://host/r.git", repo_token=secret)
    await with_token.save("with-token", overwrite=True)  # type: ignore[misc]
    await DaytonaSandbox(api_key=secret).save("with-key", overwrite=True)  # type: ignore[misc]
    for provider, options in (
        ("local-sandbox/with-token", {"repo_url": "http://127.0.0.1:9/r.git"}),
        ("daytona-sandbox/with-key", {"api_url": "http://127.0.0.1:9/api"}),
        ("daytona", {"api_url": "http://127.0.0.1:9/api"}),
    ):
        with pytest.raises(ConfigurationError, match="is no option of a single run"):
            await batch(["SUBMIT()"], provider=provider, provider_options=options)


async def test_a_file_of_json_lines_may_have_nan_and_what_prepares_a_fence(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"x": NaN}\n{"x": -Infinity}\n')
    prepare = "```python\nlabel = 'x is'\n```"
    found = await batch("SUBMIT(y=f'{label} {x}')", str(tmp_path / "in.jsonl"), prepare=prepare)
    assert [result.y for result in found] == ["x is nan", "x is -inf"]
