"""A block that a script saves where no Prefect server is configured."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from ..infra.prefect_database import make_prefect_home

SAVE = """
from rlm_batch import DaytonaSandbox
DaytonaSandbox(target="eu").save("mine", overwrite=True)
print("saved", DaytonaSandbox.load("mine").target)
"""
# Every Python that is started notes what it looks up or connects to.
WATCH = """
import sys

def watch(event, arguments):
    if event in ("socket.getaddrinfo", "socket.connect"):
        place = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
        host = place[0] if isinstance(place, tuple) else place
        with open({path!r}, "a") as file:
            file.write(f"{{host}}\\n")

sys.addaudithook(watch)
"""
OPT_OUTS = ("CI", "DO_NOT_TRACK", "GITHUB_ACTIONS", "PREFECT_API_URL", "PREFECT_SERVER_ANALYTICS_ENABLED")


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("no_process_left")
def test_it_is_saved_and_nobody_else_hears_of_it_and_no_error_is_logged(tmp_path: Path) -> None:
    home = make_prefect_home(tmp_path / "home")
    heard = tmp_path / "heard"
    (tmp_path / "sitecustomize.py").write_text(WATCH.format(path=str(heard)))
    environment = {name: value for name, value in os.environ.items() if name not in OPT_OUTS}
    environment |= {"PREFECT_HOME": str(home), "PYTHONPATH": str(tmp_path)}
    # A terminal is where Prefect tells of people who are new to it.
    terminal, end = pty.openpty()
    try:
        command = [sys.executable, "-c", SAVE]
        process = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=end, stderr=subprocess.PIPE, timeout=200, check=False
        )
        errors = process.stderr.decode()
        assert process.returncode == 0, errors
        assert b"saved eu" in os.read(terminal, 65536)
    finally:
        os.close(terminal)
        os.close(end)
    assert set(heard.read_text().split()) <= {"127.0.0.1", "localhost", "None"}
    assert "ERROR" not in errors
    assert "Traceback" not in errors
