"""Imports of the package change nothing in a process: Prefect imports it in each of its own, for our block types."""

import json
import os
import sys
from pathlib import Path

import pytest

from .infra.programs import run_program

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(
    ".".join(("rlm_batch", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for folder in ("blocks", "cli", "deployments", "flows", "sandbox", "tasks")
    for path in (ROOT / folder).rglob("*.py")
    if not path.is_relative_to(ROOT / "sandbox" / "driver")  # That code runs in sandboxes.
)
PROGRAM = """
import importlib, json, logging, os, sys
import prefect.main

def find_filters():
    loggers = {**logging.root.manager.loggerDict, "": logging.root}
    filters = {name: getattr(logger, "filters", ()) for name, logger in loggers.items()}
    # Prefect and OpenTelemetry, which the SDK of Daytona imports, give loggers of their own a filter.
    return {
        name: [str(one) for one in found if not type(one).__module__.startswith(("prefect.", "opentelemetry."))]
        for name, found in filters.items()
    }

def find_reader(frame):
    # The import system opens modules, and other packages read files of their own.
    others = ("importlib", f"{os.sep}site-packages{os.sep}")
    while frame is not None and not any(other in frame.f_code.co_filename for other in others):
        if frame.f_code.co_filename.startswith(sys.argv[1]):
            return frame.f_code.co_filename
        frame = frame.f_back
    return None

def note_open(event, arguments):
    if event == "open" and (reader := find_reader(sys._getframe(1))):
        opened.append(f"{reader} opens {arguments[0]}")

opened, environment, filters = [], dict(os.environ), find_filters()
sys.addaudithook(note_open)
for name in sys.argv[2:]:
    importlib.import_module(name)
after, now = dict(os.environ), find_filters()
print(json.dumps({
    "imported": len([name for name in sys.argv[2:] if name in sys.modules]),
    "opened": opened,
    "environment": sorted(name for name in {*environment, *after} if environment.get(name) != after.get(name)),
    "filters": {name: found for name, found in now.items() if found and found != filters.get(name, [])},
}))
"""


def import_modules(modules: list[str]) -> dict[str, object]:
    """Import modules in a new Python, and return what they changed and which files our code read."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LITELLM_", "DO_NOT_"))}
    environment |= {"HTTP_PROXY": "http://127.0.0.1:9", "no_proxy": "example.org"}
    command = [sys.executable, "-c", PROGRAM, str(ROOT) + os.sep, *modules]
    done = run_program(command, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(["rlm_batch.blocks.block_types", "rlm_batch.flows.batch"], id="in every Prefect process"),
        pytest.param(MODULES, id="all", marks=pytest.mark.full),
    ],
)
def test_an_import_changes_no_variable_adds_no_log_filter_and_reads_no_file(modules: list[str]) -> None:
    assert import_modules(modules) == {"imported": len(modules), "opened": [], "environment": [], "filters": {}}
