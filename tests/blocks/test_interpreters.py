"""What a script pays for an interpreter: its provider, and no Prefect."""

import os
import subprocess
import sys
from typing import Any

import pytest

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


def test_a_daytona_interpreter_imports_its_sdk_and_no_prefect(running_daytona: object, daytona: Any) -> None:
    assert run_script("DaytonaInterpreter") == "['daytona']"


@pytest.mark.full
def test_a_modal_interpreter_imports_its_sdk_and_no_prefect(modal_standin: Any) -> None:
    hello = modal_standin.hello
    credentials = [f"{name}={hello[name]}" for name in ("token_id", "token_secret")]
    assert run_script("ModalInterpreter", *credentials) == "['modal']"
