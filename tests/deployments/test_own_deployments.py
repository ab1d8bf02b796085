"""Deployments of one's own, as `rlm-batch deploy FLOW FILE --name NAME` makes them."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.exceptions import ObjectNotFound

from rlm_batch.cli.main import main
from rlm_batch.deployments.deploy import deploy

CODE = "SUBMIT(loss=(lr - 0.1) ** 2)\n"
SWEEP = ("sweep", "train.py", "--grid", "lr=0.1,0.01", "--minimize", "loss")
Answer = tuple[int, str, str]


POOL = "one's own"  # a work pool that no worker of another test serves


@pytest.fixture(scope="module")
def pool(server: str) -> None:
    """Make our deployments and their work pool, and another one."""

    async def make() -> None:
        await deploy()
        async with get_client() as client:
            await client.create_work_pool(WorkPoolCreate(name=POOL, type="process"), overwrite=True)

    asyncio.run(make())


@pytest.fixture
def command(
    pool: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """Run `rlm-batch deploy` with these words, where train.py is; return its status and what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("train.py").write_text(CODE)

    def run(*words: str) -> Answer:
        with pytest.raises(SystemExit) as end:
            main(["deploy", *words])
        assert isinstance(end.value.code, int)
        said = capsys.readouterr()
        return end.value.code, said.out, said.err

    return run


def read(name: str) -> Any:
    """Return the deployment on the server, or None."""

    async def call() -> Any:
        async with get_client() as client:
            try:
                return await client.read_deployment_by_name(name)
            except ObjectNotFound:
                return None

    return asyncio.run(call())


def change(name: str, **fields: Any) -> None:
    """Do what a person does in the UI: set other fields, pause the schedule, and add one."""

    async def call(client: PrefectClient) -> None:
        deployment = await client.read_deployment_by_name(name)
        (schedule,) = deployment.schedules
        await client.update_deployment(deployment.id, DeploymentUpdate(**fields))
        await client.update_deployment_schedule(deployment.id, schedule.id, active=False)
        new = DeploymentScheduleCreate(schedule=IntervalSchedule(interval=3600), active=True)  # type: ignore[arg-type]
        await client.create_deployment_schedules(deployment.id, [new])

    async def open_and_call() -> None:
        async with get_client() as client:
            await call(client)

    asyncio.run(open_and_call())


def test_it_has_its_code_and_schedule_and_made_again_it_keeps_what_a_person_has_changed_but_the_parameters(
    command: Callable[..., Answer],
) -> None:
    name = ("--name", "nightly-lr")
    status, out, err = command(*SWEEP, *name, "--cron", "0 2 * * *", "--max-workers", "2", "--work-pool", POOL)
    assert (status, out.splitlines()[:2]) == (
        0,
        [f"sweep/nightly-lr made, in the work pool {POOL}", "It runs by itself: 0 2 * * * (UTC)"],
    ), err
    assert f"no worker of the work pool {POOL} is there" in err
    made = read("sweep/nightly-lr")
    expected = {"code": CODE, "grid": {"lr": [0.1, 0.01]}, "objective": "loss", "max_workers": 2}
    assert (made.parameters, made.entrypoint, made.work_pool_name) == (
        expected,
        "rlm_batch.flows.sweep.sweep",
        POOL,
    )
    assert made.enforce_parameter_schema
    assert made.concurrency_options.collision_strategy == "CANCEL_NEW"

    change("sweep/nightly-lr", tags=["mine"], parameters={**expected, "max_workers": 7}, concurrency_limit=3)
    Path("train.py").write_text("SUBMIT(loss=lr)\n")
    status, out, err = command(*SWEEP, *name, "--cron", "0 3 L * *", "--timezone", "Europe/Berlin", "--retries", "0")
    assert status == 0, err
    assert "max_workers, which was 7, is not given any more" in out
    kept = read("sweep/nightly-lr")
    assert kept.id == made.id
    assert kept.parameters == {
        "code": "SUBMIT(loss=lr)\n",
        "grid": {"lr": [0.1, 0.01]},
        "objective": "loss",
        "retries": 0,
    }
    assert (kept.tags, kept.global_concurrency_limit.limit) == (["mine"], 3)
    assert {str(getattr(item.schedule, "cron", "hourly")): item.active for item in kept.schedules} == {
        "0 3 L * *": False,
        "hourly": True,
    }
    assert "0 3 L * * (Europe/Berlin), paused" in command("--list")[1]

    status, out, err = command(*SWEEP, *name)
    assert len(read("sweep/nightly-lr").schedules) == 2  # without one in the command they stay
    assert command("reap", "--name", "sweeping", "--dry-run", "--interval", "60")[0] == 0
    listed = [line.split()[0] for line in command("--list")[1].splitlines()[1:]]
    assert {"reap/sweeping", "sweep/nightly-lr"} <= set(listed)
    assert not {"reap/local", "sweep/nightly"} & set(listed)
    assert command("--remove", "sweeping")[:2] == (0, "reap/sweeping removed\n")
    assert command("--remove", "sweep/nightly-lr")[:2] == (0, "sweep/nightly-lr removed\n")
    assert read("sweep/nightly-lr") is None
    assert "sweep/nightly-lr" not in command("--list")[1]
    status, _, err = command("--remove", "reap/local")
    assert (status, err) == (
        2,
        "rlm-batch: reap/local is one of rlm-batch's own, which rlm-batch up would make again\n",
    )


@pytest.mark.full
def test_every_flow_can_be_deployed_with_all_of_its_code(command: Callable[..., Answer]) -> None:
    for number in (1, 2):
        Path(f"step{number}.py").write_text(f"a = {number}\n")
    Path("in.jsonl").write_text('{"lr": 1}\n')
    steps = ["a = 1\n", "a = 2\n"]
    cases: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "batch": (("step1.py", "step2.py", "--provider", "local", "--memory-mib", "512"), {"code": steps}),
        "chunks": (
            ("step1.py", "--data", "in.jsonl", "--chunk-size", "1", "--reduce", "step2.py", "--prepare", "step2.py"),
            {"code": steps[0], "reduce": steps[1], "prepare": steps[1], "data": str(Path("in.jsonl").absolute())},
        ),
        "sequence": (("step1.py", "step2.py"), {"steps": steps}),
        "rlm": (("Which?", "--language-model", "language-model/x"), {"query": "Which?"}),
    }
    for flow, (words, expected) in cases.items():
        status, _, err = command(flow, *words, "--name", "of-a-test")
        assert status == 0, err
        found = read(f"{flow}/of-a-test")
        assert {name: found.parameters[name] for name in expected} == expected
        assert (found.schedules, found.concurrency_options.collision_strategy) == ([], "ENQUEUE")
    assert read("batch/of-a-test").parameters["provider_options"] == {"memory_mib": "512"}
    several = command("--remove", "of-a-test")
    assert several[0] == 2
    assert "batch/of-a-test or chunks/of-a-test" in several[2]
    for flow in cases:
        assert command("--remove", f"{flow}/of-a-test")[0] == 0


def test_what_is_wrong_is_a_sentence_and_makes_nothing(
    command: Callable[..., Answer],
) -> None:
    Path("big.py").write_text(f"text = {json.dumps('x' * 600_000)}\n")
    named = (*SWEEP, "--name", "x")
    cases: dict[tuple[str, ...], str] = {
        ("swep", "train.py", "--grid", "lr=1"): "there is no flow 'swep': it is batch, ",
        ("--rest",): "there is no option '--rest'",
        ("--name", "x", "sweep", "train.py"): "the flow comes first and its options after it: rlm-batch deploy sweep",
        ("sweep", "nosuch.py", "--name", "x"): "the file nosuch.py cannot be read: No such file",
        ("batch", "train.py", "--inputs", "nosuch.csv", "--name", "x"): "nosuch.csv",
        ("sweep", "train.py", "--name", "x"): "the space is missing",
        SWEEP: "--name",
        **{
            (*SWEEP, "--name", name): "--name is empty, has spaces around it, or has one of"
            for name in ("a/b", "local#mine", "x?y", "..", " x", "a\tb", "")
        },
        (*SWEEP, "--name", "x" * 201): "--name has 201 characters",
        ("--list", "--remove", "x"): "--list and --remove are two things to do",
        (*SWEEP, "--name", "local"): "sweep/local is a deployment of rlm-batch's own: give another --name",
        (*named, "--cron", "0 2 * *"): "--cron '0 2 * *' is no schedule: it is five fields",
        (*named, "--cron", "0 2 * * *", "--interval", "5"): "two schedules",
        (*named, "--cron", "0 0 31 2 *"): "--cron '0 0 31 2 *' never runs: none of its months has its day",
        (*named, "--cron", "0 0 31 APR,6 ?"): "never runs: none of its months has its day",
        (*named, "--cron", "0 0 2 * * *"): "--cron '0 0 2 * * *' is no schedule: it is five fields",
        (*named, "--interval", "0"): "--interval is a number of seconds, from 1 to those of ten years",
        (*named, "--interval", "1e300"): "--interval is a number of seconds, from 1 to those of ten years",
        (*named, "--timezone", "Europe/Berlin"): "there is none",
        (*named, "--cron", "0 2 * * *", "--timezone", "Berlin"): "there is no time zone 'Berlin'",
        (*named, "--work-pool", "nosuch"): "there is no work pool nosuch on this Prefect server",
        (*named, "--provider", "moon"): "unknown provider 'moon'",
        (*named, "--max-workers", "0"): "max_workers",
        ("batch", "big.py", "--name", "x"): "and Prefect keeps 524,288 in a deployment",
        ("--remove", "nosuch"): "there is no deployment nosuch that could be removed",
    }
    for words, reason in cases.items():
        status, out, err = command(*words)
        assert (status, out) == (2, ""), words
        assert reason in err, (words, err)
        assert err.count("\n") == 1
    assert read("sweep/x") is None
