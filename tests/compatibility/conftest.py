"""Jobs that earlier versions have run, each with a copy of what it wrote."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import rlm_batch
from rlm_batch import ChunksReport, Failure, Result, RlmAnswer, SweepReport
from rlm_batch.blocks.local.provider import LocalProvider

FIXTURES = Path(__file__).parents[1] / "fixtures"
JOBS = sorted(path.name for path in (FIXTURES / "jobs").iterdir())


@dataclass(frozen=True)
class Job:
    """A call of a flow, what it returned then, and a copy of the ledger that it wrote."""

    name: str
    flow: str
    arguments: dict[str, Any]
    outcomes: list[dict[str, Any]]
    ledger: Path

    async def run(self, **arguments: Any) -> Any:
        """Calls the flow again, on that ledger unless the arguments name another."""
        call = {**self.arguments, "provider": "local:none", "results_path": str(self.ledger), **arguments}
        return await getattr(rlm_batch, self.flow)(**call)

    def lines(self) -> list[dict[str, Any]]:
        """The whole lines of the ledger's parts."""
        texts = (part.read_text(encoding="utf-8") for part in sorted(self.ledger.glob("part-*.jsonl")))
        return [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]


def copy_job(name: str, folder: Path) -> Job:
    """The job of that name, with its files copied below the folder."""
    source = FIXTURES / "jobs" / name
    copy = folder / name
    shutil.copytree(source, copy)
    call = json.loads((source / "job.json").read_text())
    return Job(name, call.get("flow", ""), call.get("arguments", {}), call["outcomes"], copy / "ledger")


def outcomes_of(report: Any) -> list[Result | Failure]:
    """The outcomes that a flow returned, in order."""
    match report:
        case RlmAnswer():
            return [report.result]
        case SweepReport():
            return list(report.trials)
        case ChunksReport():
            return [*report.results.values(), *([] if report.reduction is None else [report.reduction])]
        case _:
            return list(report)


def assert_outcome_is(outcome: Result | Failure, expected: dict[str, Any]) -> None:
    """Fails where anything that was known of the outcome is missing or different; more may be known today."""
    meta, known = json.loads(json.dumps(asdict(outcome.meta))), expected["meta"]
    assert {name: meta["queries"][name] for name in known["queries"]} == known["queries"]
    assert {name: meta[name] for name in known if name != "queries"} == {
        name: value for name, value in known.items() if name != "queries"
    }
    if "outputs" in expected:
        assert isinstance(outcome, Result)
        assert outcome.outputs == expected["outputs"]
    else:
        assert isinstance(outcome, Failure)
        assert type(outcome.error).__name__ == expected["error"]
        assert type(outcome.error) is getattr(rlm_batch, expected["error"])
        assert str(outcome.error) == expected["text"]
        assert {name: getattr(outcome.error, name) for name in expected["details"]} == expected["details"]


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results root of the test's own."""
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    """Each of the jobs."""
    return copy_job(request.param, tmp_path)


@pytest.fixture
def job_named(tmp_path: Path) -> Callable[[str], Job]:
    """Gives the job of a name."""
    return lambda name: copy_job(name, tmp_path)


@pytest.fixture
def machine_of_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """What keys have of the machine that runs the job, which is its Python and where its volumes are, is as it was."""
    fingerprint = LocalProvider.fingerprint

    async def fingerprint_of_then(sandbox: LocalProvider) -> dict[str, Any]:
        found = await fingerprint(sandbox)
        assert found["python"] == sys.version.split()[0]
        found["python"] = "3.11.7"
        if "volume" in found:
            name, mount, _ = found["volume"]
            found["volume"] = [name, mount, "/data/example/volumes"]
        return found

    monkeypatch.setattr(LocalProvider, "fingerprint", fingerprint_of_then)


@pytest.fixture
def sandboxes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that sandboxes were opened for, one entry for each sandbox."""
    opened: list[str] = []
    open_sandbox = LocalProvider.open

    async def count_and_open(sandbox: LocalProvider, labels: dict[str, str]) -> Any:
        opened.append(labels["rlm-batch-run"])
        return await open_sandbox(sandbox, labels)

    monkeypatch.setattr(LocalProvider, "open", count_and_open)
    return opened
