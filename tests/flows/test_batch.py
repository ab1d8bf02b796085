"""The batch flow."""

import asyncio
import json
import os
import re
import uuid

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import TaskRun
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
    SubmitError,
    batch,
    chunks,
    rlm,
    sequence,
    sweep,
)
from rlm_batch.flows.listener import FlowListener

from ..infra.listening import run_with_listener
from ..infra.waiting import wait_until_async
from .conftest import OutputListener, find_run_id

pytestmark = pytest.mark.anyio

FAILING = {
    "raise ValueError('no such thing')": (CodeError, "no such thing"),
    "x = (": (CodeSyntaxError, "not valid Python"),
    "import os; os._exit(3)": (CodeCrashed, "exited with status 3"),
    "SUBMIT(x=1j)": (SubmitError, "x is a complex"),
    "SUBMIT(x='y' * 2**21)": (SubmitError, "save_to_volume"),
}
RANDOM = "import os; SUBMIT(random=os.urandom(8).hex())"


async def read_task_runs(run_id: uuid.UUID) -> list[TaskRun]:
    async with get_client() as client:
        return await client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])))


async def test_each_failure_has_its_error_and_results_keep_their_order():
    code = [text for number, failing in enumerate(FAILING) for text in (failing, f"SUBMIT(number={number})")]
    results = await batch(code, on_failure="return", max_workers=2)
    assert [result.meta.index for result in results] == list(range(len(code)))
    assert [result.number for result in results[1::2]] == list(range(len(FAILING)))
    for failure, (kind, message) in zip(results[::2], FAILING.values(), strict=True):
        assert isinstance(failure, Failure)
        assert type(failure.error) is kind
        assert message in str(failure.error)


async def test_endless_code_ends_at_its_timeout_or_the_runs_deadline():
    forever = "import time; time.sleep(1000)"
    (late,) = await batch([forever], timeout=1, on_failure="return")
    assert isinstance(late.error, ExecutionTimeout)
    assert "timeout of 1 s" in str(late.error)
    busy = ["while True: pass"] * 3 * (os.cpu_count() or 1)
    for failure in await batch(busy, max_workers=99, timeout=2, on_failure="return"):
        assert " s of CPU time; give it more with `timeout`" in str(failure.error)
    # The second execution has not started at the deadline.
    for failure in await batch([forever] * 2, max_workers=1, deadline=1, on_failure="return"):
        assert isinstance(failure.error, DeadlineExceeded)
        assert "deadline of 1 s" in str(failure.error)


async def test_failures_are_raised_at_the_end_with_all_outcomes(results):
    with pytest.raises(ExecutionsFailed, match="1 of 3 executions failed") as raised:
        await batch(["SUBMIT(a=1)", "1/0", "SUBMIT(a=3)"])
    first, failure, third = raised.value.results
    assert (first.a, third.a) == (1, 3)
    assert raised.value.failures == [failure]
    assert "ZeroDivisionError" in str(failure.error)
    assert raised.value.results_path == str(results / str(find_run_id(results)))


async def test_parameters_too_long_for_prefect_are_stored_in_files(results):
    """Code, inputs and prepare are too long for parameters; the code has unusual letters."""
    inputs = [{"text": str(number) * 200_000} for number in range(3)]
    code = f"# {'x' * 300_000}\nSUBMIT(size=len(text), first=text[0], letters='a\u2028b\x85c', base=base)"
    outcomes = await batch(code, inputs, prepare=f"# {'x' * 600_000}\nbase = 7")
    assert [(result.size, result.first) for result in outcomes] == [(200_000, str(number)) for number in range(3)]
    assert {(result.letters, result.base) for result in outcomes} == {("a\u2028b\x85c", 7)}
    async with get_client() as client:
        parameters = (await client.read_flow_run(find_run_id(results))).parameters
    assert [parameters[name][:2] for name in ("code", "inputs", "prepare")] == ["@/"] * 3


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"code": []}, "empty"),
        ({"code": ["1"], "inputs": [{"x": 1}]}, "one piece of code"),
        ({"code": "train.py", "inputs": [{"x": 1}]}, r"'train.py', the name of a file.*Path\('train.py'\).read_text"),
        ({"code": "1", "inputs": []}, "no rows"),
        ({"code": "1", "inputs": "nosuch.jsonl"}, "No such file"),
        ({"code": "1", "inputs": "nosuch.xlsx"}, "is not JSON lines"),
        ({"code": "1", "provider": "nosuch"}, "unknown provider"),
        ({"code": "1", "provider": "local:nosuch"}, "unknown provider 'local:nosuch'"),
        ({"code": "1", "provider": "rlm-local-sandbox/nosuch"}, "no block rlm-local-sandbox/nosuch"),
        ({"code": "1", "results_path": "/proc/nosuch"}, "results_path"),
        ({"code": "1", "max_workers": 0}, "max_workers"),
    ],
)
async def test_invalid_input_is_refused_with_one_sentence(parameters, message):
    with pytest.raises(ConfigurationError, match=message) as raised:
        await batch(**parameters)
    assert "\n" not in str(raised.value)


async def test_an_unknown_parameter_is_refused_with_the_flows_name():
    with pytest.raises(TypeError, match=r"batch\(\) got an unexpected keyword argument 'max_worker'"):
        await batch(["1"], max_worker=3)  # type: ignore[reportCallIssue]


async def test_an_execution_with_a_damaged_ledger_line_is_rerun(tmp_path):
    async def run() -> list[str]:
        code, inputs = "import os\nSUBMIT(random=os.urandom(8).hex() if 1 // x else 0)", [{"x": 1}, {"x": 0}, {"x": 1}]
        results = await batch(code, inputs, results_path=str(tmp_path), on_failure="return", max_workers=1)
        return [results[0].random, results[2].random]

    first = await run()
    (part,) = tmp_path.glob("part-*.jsonl")
    good, bad, other = [json.loads(line) for line in part.read_text().splitlines()]
    assert (good["version"], good["status"], good["outputs"], good["attempt"]) == (
        1, "succeeded", {"random": first[0]}, 1
    )  # fmt: skip
    assert (bad["status"], bad["error"]["error"], bad["error"]["type"]) == ("failed", "CodeError", "ZeroDivisionError")
    assert (good["meta"]["variables"], good["meta"]["isolation"]) == ({"x": 1}, bad["meta"]["isolation"])
    assert len({good["key"], bad["key"], other["key"]}) == 3
    part.write_text("".join(json.dumps(line) + "\n" for line in ({**good, "meta": 5}, bad, other)))
    again = await run()
    assert again[0] != first[0]
    assert again[1] == first[1]


async def test_cached_results_are_reused_and_replicates_stay_separate():
    first = await batch([RANDOM] * 3, cache_results=True)
    again = await batch([RANDOM] * 4, cache_results=True)
    assert [result.random for result in first] == [result.random for result in again[:3]]
    assert len({result.random for result in again}) == 4
    assert not {result.random for result in await batch([RANDOM] * 3)} & {result.random for result in first}


async def test_each_worker_reuses_one_sandbox_on_request():
    code = ["SUBMIT()"] * 4
    reused = await batch(code, max_workers=2, reuse_sandboxes=True)
    assert len({result.meta.sandbox_id for result in reused}) <= 2
    fresh = await batch(code, max_workers=2)
    assert len({result.meta.sandbox_id for result in fresh}) == 4


async def test_a_reused_sandbox_with_a_killed_supervisor_is_replaced():
    code = ["import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(1000)", "SUBMIT(fine=True)"]
    lost, fine = await batch(code, provider="local:none", max_workers=1, reuse_sandboxes=True, on_failure="return")
    assert type(lost.error).__name__ == "OutcomeUnknown"
    assert fine.fine


async def test_a_reused_sandbox_without_its_folder_is_replaced_before_the_next_execution():
    code = ["import os, shutil; shutil.rmtree(os.getcwd())", "open('x', 'w').close(); SUBMIT(fine=True)"]
    first, fine = await batch(code, provider="local:none", max_workers=1, reuse_sandboxes=True, retries=0)
    assert fine.fine
    assert fine.meta.attempt == 1
    assert fine.meta.sandbox_id != first.meta.sandbox_id


async def test_each_execution_is_a_task_run_with_state_tags_and_attempts(results):
    await batch(["SUBMIT(a=1)", "1/0"], on_failure="return")
    run_id = find_run_id(results)

    async def have_ended() -> bool:
        states = {task.name: task.state_name for task in await read_task_runs(run_id)}
        return states == {"execution 0": "Completed", "execution 1": "Failed"}

    await wait_until_async(have_ended)
    assert {"sandbox", "sandbox:local"} <= set((await read_task_runs(run_id))[0].tags)


@pytest.mark.parametrize("flow", [batch, chunks, rlm, sequence, sweep], ids=lambda flow: flow.name)
def test_parameters_have_descriptions_for_the_ui(flow):
    schema = flow.parameters.model_dump()["properties"]
    assert [name for name in schema if not schema[name].get("description")] == []
    assert flow is not batch or schema["max_workers"]["minimum"] == 1


async def test_cancelling_the_flow_ends_executions_and_cancels_task_runs(results, caplog):
    code, output = "import time; print('begun', flush=True); time.sleep(1000)", OutputListener()
    flow = asyncio.create_task(run_with_listener(batch, output, code, [{"i": i} for i in range(6)], max_workers=2))
    await output.wait_for(2)
    run_id = find_run_id(results)

    async def are_two(name: str) -> bool:
        return [run.state_name for run in await read_task_runs(run_id)] == [name, name]

    await wait_until_async(lambda: are_two("Running"))
    flow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flow
    await wait_until_async(lambda: are_two("Cancelled"))
    assert "Finished in state Cancelled" not in caplog.text


async def test_provider_options_apply_without_a_saved_block():
    code = "import resource\nSUBMIT(mib=resource.getrlimit(resource.RLIMIT_AS)[0] >> 20, volume=VOLUME is not None)"
    options = {"memory_mib": "300", "volume_name": "notes"}
    (result,) = await batch([code], provider_options=options)
    assert result.outputs == {"mib": 300, "volume": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 300}, "the provider local has no setting `memory`: it has volume_name, "),
        ({"memory_mib": 3}, "`memory_mib` is 3: it should be greater than or equal to 64"),
        ({"packages": ["git+https://host/x"]}, "packages"),
        ({"repo_token": "hidden"}, "repo_token cannot be set for one run, because it is a secret"),
        ({"max_sandboxes": 50}, "max_sandboxes cannot be set for one run"),
        ({"isolation": "none"}, "isolation cannot be set for one run"),
    ],
)
async def test_unknown_provider_options_are_refused_with_one_sentence(options, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)) as caught:
        await batch(["SUBMIT()"], provider_options=options)
    assert "hidden" not in str(caught.value)


async def test_a_run_cannot_change_the_address_that_gets_secrets():
    secret = SecretStr("hidden")
    with_token = LocalSandbox(repo_url="https://host/r.git", repo_token=secret)
    await with_token.save("with-token", overwrite=True)  # type: ignore[misc]
    await DaytonaSandbox(api_key=secret).save("with-key", overwrite=True)  # type: ignore[misc]
    for provider, options in (
        ("rlm-local-sandbox/with-token", {"repo_url": "http://127.0.0.1:9/r.git"}),
        ("rlm-daytona-sandbox/with-key", {"api_url": "http://127.0.0.1:9/api"}),
        ("daytona", {"api_url": "http://127.0.0.1:9/api"}),
    ):
        with pytest.raises(ConfigurationError, match="cannot be set for one run"):
            await batch(["SUBMIT()"], provider=provider, provider_options=options)


async def test_large_variables_warn_once_and_name_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlm_batch.tasks.execution.LARGE_BYTES", 10_000)
    warnings: list[str] = []

    class Listener(FlowListener):
        def on_warning(self, text: str) -> None:
            warnings.append(text)

    inputs = [{"x": "x"}, {"x": "x" * 10_000}, {"x": "x" * 20_000}]
    await run_with_listener(batch, Listener(), "SUBMIT(n=len(x))", inputs, provider="local:none")
    (text,) = warnings
    assert text.startswith("execution 1 has 0 MiB of code and variables")
    assert text.endswith("pass the path of a file with `mounts` instead")
