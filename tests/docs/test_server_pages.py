"""The commands of the pages on Prefect and on scaling, as a user types them beside `rlm-batch up`."""

import re
import shlex
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ..deployments.test_up import HANG_SECONDS, Up
from ..infra.logged_process import run_logged_process
from ..infra.prefect_database import make_prefect_home
from ..infra.programs import COMMAND, run_program
from ..infra.waiting import wait_until
from .pages import ROOT, commands, names, read_prose
from .test_programs import write_files

PAGES = ("docs/prefect.md", "docs/scaling.md")
NOT_HERE = {
    "pip install opentelemetry-distro opentelemetry-exporter-otlp": "No test needs the network.",
    "docker compose --file deployments/compose.yaml up --build --detach --scale server=3 --scale worker=2": (
        "It needs Docker and the network. tests/deployments/test_servers.py runs the services as processes."
    ),
}
# The commands of the block with `opentelemetry-instrument` have a collector, and tests have none.
NO_EXPORTERS = {f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "METRICS", "LOGS")}


def list_commands() -> list[str]:
    """Return the lines of the pages' shell blocks, and the deploy commands in their sentences."""
    lines = [line for page in PAGES for line in commands(page)]
    return lines + [name for page in PAGES for name in names(read_prose(page)) if name.startswith("rlm-batch deploy")]


def test_commands_that_are_not_run_are_still_in_the_pages() -> None:
    assert set(NOT_HERE) <= set(list_commands())


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_command_of_the_pages_succeeds(tmp_path: Path) -> None:
    make_prefect_home(tmp_path / ".prefect")
    write_files(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    placeholders = {"ADDRESS": "http://127.0.0.1:9/", "SERVER": "127.0.0.1", "/mnt": str(tmp_path)}
    results = str(tmp_path / "shared" / "results")  # the placeholder in the pages is below /mnt
    with Up(tmp_path, RLM_BATCH_RESULTS=results, **NO_EXPORTERS) as up, ExitStack() as workers:
        up.wait_until_ready()
        placeholders["4200"] = str(up.port)
        for line in list_commands():
            words = shlex.split(re.sub("|".join(placeholders), lambda match: placeholders[match.group()], line))
            if line in NOT_HERE or line == "rlm-batch up":  # `Up` has run the latter.
                continue
            if words[0] == "export":
                up.environment |= dict(word.split("=", 1) for word in words[1:])
            elif line.startswith(("prefect worker start", "rlm-batch worker")):
                log = tmp_path / "worker.log"
                program = [COMMAND, *words[1:]] if words[0] == "rlm-batch" else words
                workers.enter_context(run_logged_process(program, log, env=up.environment, cwd=tmp_path))
                wait_until(lambda: len(list_workers(up)) == 2, "the worker", timeout=HANG_SECONDS)
            else:
                done = run_beside_shared_server(line, up) if line.startswith("rlm-batch server") else up.type(*words)
                assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        jobs = {"flows": {"name": {"any_": ["rlm-batch"]}}}
        states = ["SCHEDULED", "PENDING", "RUNNING"]
        wait_until(lambda: not list_runs(up, states, **jobs), "the jobs", timeout=HANG_SECONDS)
        assert len(list_runs(up, ["COMPLETED"], **jobs)) == 4
        assert not list_runs(up, ["FAILED", "CRASHED", "CANCELLED"])


def list_workers(up: Up) -> list[Any]:
    return up.api("work_pools/rlm-batch/workers/filter")


def list_runs(up: Up, states: list[str], **others: Any) -> list[str]:
    """Return the flow runs in these states, each with its state's message. `others` are further filters."""
    runs = up.api("flow_runs/filter", flow_runs={"state": {"type": {"any_": states}}}, **others)
    return [f"{run['name']}: {run['state']['message']}" for run in runs]


def run_beside_shared_server(line: str, up: Up) -> subprocess.CompletedProcess[str]:
    """Run a command on the command line's own server, which another command starts."""
    environment = {**up.environment, "RLM_BATCH_SERVER": "shared", "PREFECT_HOME": str(up.home / "another")}
    del environment["PREFECT_API_URL"]
    if line == "rlm-batch server":
        make_prefect_home(up.home / "another")
        run_program([COMMAND, "reap"], env=environment)
    return run_program(shlex.split(line), env=environment)
