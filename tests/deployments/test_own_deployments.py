"""Users' own deployments, as `rlm-batch deploy FLOW FILE --name NAME` creates them."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectNotFound

from rlm_batch.cli.main import main
from rlm_batch.deployments.deploy import deploy

from .conftest import ask

CODE = "SUBMIT(loss=(lr - 0.1) ** 2)\n"
SWEEP = ("sweep", "train.py", "--grid", "lr=0.1,0.01", "--minimize", "loss")
Answer = tuple[int, str, str]


POOL = "one's own"  # a work pool that no other test's worker serves


@pytest.fixture(scope="module")
def pool(server: str) -> None:
    """Create the project's deployments and their work pool, and another work pool."""

    asyncio.run(deploy())
    ask(lambda client: client.create_work_pool(WorkPoolCreate(name=POOL, type="process"), overwrite=True))


@pytest.fixture
def command(
    pool: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """Return a function that runs `rlm-batch deploy` next to train.py and returns its status and output."""
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
    try:
        return ask(lambda client: client.read_deployment_by_name(name))
    except ObjectNotFound:
        return None


@pytest.fixture
def delete() -> Iterator[list[str]]:
    """Yield a list of names, and delete these deployments after the test so that the server schedules no runs."""
    names: list[str] = []
    yield names
    for deployment in map(read, names):
        ask(lambda client: client.delete_deployment(deployment.id))  # noqa: B023 - called at once


def test_a_deployment_has_its_code_and_schedule_and_can_be_updated(
    command: Callable[..., Answer], delete: list[str]
) -> None:
    name = ("--name", "nightly-lr", "--work-pool", POOL)
    status, out, err = command(*SWEEP, *name, "--cron", "0 2 * * *", "--max-workers", "2")
    assert (status, out.splitlines()[:2]) == (
        0,
        [f"rlm-sweep/nightly-lr made, in the work pool {POOL}", "It runs by itself: 0 2 * * * (UTC)"],
    ), err
    delete.append("rlm-sweep/nightly-lr")
    made = read("rlm-sweep/nightly-lr")
    searched = {"grid": {"lr": [0.1, 0.01]}, "objective": "loss", "direction": "minimize"}
    assert (made.parameters, made.entrypoint, made.work_pool_name) == (
        {"code": CODE, **searched, "max_workers": 2},
        "rlm_batch.flows.sweep.sweep",
        POOL,
    )
    assert made.enforce_parameter_schema
    assert made.concurrency_options.collision_strategy == "CANCEL_NEW"

    Path("train.py").write_text("SUBMIT(loss=lr)\n")
    status, out, err = command(
        *SWEEP, "--name", "nightly-lr", "--cron", "0 3 * * *", "--timezone", "Europe/Berlin", "--retries", "0"
    )
    assert status == 0, err
    again = read("rlm-sweep/nightly-lr")
    assert (again.id, again.work_pool_name) == (made.id, POOL)
    assert again.parameters == {"code": "SUBMIT(loss=lr)\n", **searched, "retries": 0}
    (schedule,) = again.schedules
    assert (schedule.schedule.cron, schedule.schedule.timezone, schedule.active) == ("0 3 * * *", "Europe/Berlin", True)

    assert command(*SWEEP, *name)[0] == 0
    assert read("rlm-sweep/nightly-lr").schedules == []

    status, _, err = command(*SWEEP, "--name", "nightly-lr", "--work-pool", "nosuch")
    assert (status, err) == (2, "rlm-batch: Work pool 'nosuch' not found.\n")


@pytest.mark.full
def test_every_flow_can_be_deployed_with_its_code(command: Callable[..., Answer], delete: list[str]) -> None:
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
        "rlm": (("Which?", "--language-model", "rlm-language-model/x"), {"query": "Which?"}),
        "reap": (("--provider", "container"), {"provider": "container"}),
    }
    for flow, (words, expected) in cases.items():
        status, out, err = command(flow, *words, "--name", "of-a-test")
        assert status == 0, err
        name = out.partition(" made, ")[0]
        delete.append(name)
        deployment = read(name)
        assert {name: deployment.parameters[name] for name in expected} == expected
        options = deployment.concurrency_options
        assert (deployment.schedules, options and options.collision_strategy) == (
            [],
            "ENQUEUE" if flow != "reap" else None,
        )
    assert read("rlm-batch/of-a-test").parameters["provider_options"] == {"memory_mib": "512"}


def test_wrong_usage_is_one_sentence_and_creates_nothing(command: Callable[..., Answer]) -> None:
    Path("big.py").write_text(f"text = {json.dumps('x' * 600_000)}\n")
    named_sweep = (*SWEEP, "--name", "x")
    cases: dict[tuple[str, ...], str] = {
        ("swep", "train.py", "--grid", "lr=1"): "",
        ("sweep", "nosuch.py", "--name", "x"): "No such file or directory: 'nosuch.py'",
        ("batch", "train.py", "--inputs", "nosuch.csv", "--name", "x"): "nosuch.csv",
        ("sweep", "train.py", "--name", "x"): "pass one of",
        SWEEP: "--name",
        **{(*SWEEP, "--name", name): "is not allowed: use letters, digits" for name in ("a/b", "x?y", "..", " x", "")},
        (
            *named_sweep,
            "--cron",
            "0 2 * *",
        ): "--cron '0 2 * *' with --timezone 'UTC' is not a schedule",
        (*named_sweep, "--timezone", "Europe/Berlin"): "is not a schedule",
        (*named_sweep, "--cron", "0 2 * * *", "--timezone", "Berlin"): "with --timezone 'Berlin' is not a schedule",
        (*named_sweep, "--work-pool", "nosuch"): "nosuch",
        (*named_sweep, "--provider", "moon"): "unknown provider 'moon'",
        (*named_sweep, "--max-workers", "0"): "--max-workers is 0",
        ("batch", "big.py", "--name", "x"): "and Prefect takes 524,288 for a run",
    }
    for words, reason in cases.items():
        status, out, err = command(*words)
        assert (status, out) == (2, ""), words
        assert reason in err, (words, err)
        assert err.count("\n") == 1
    assert read("rlm-sweep/x") is None
