"""Tests of frames whose bodies are files, and of frames that the driver gets before it reads the wire."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlm_batch.sandbox.driver_settings import DriverSettings
from rlm_batch.sandbox.wire.frames import encode_frame

Launch = Callable[..., Any]


def test_a_body_may_be_a_file_that_is_deleted_after_reading(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path)
    body: dict[str, Any] = {"code": "SUBMIT(n=len(text))", "variables": {"text": "x" * 1_000_000}, "names": []}
    file = tmp_path / "body"
    file.write_text(json.dumps({**body, "output_fields": None, "queries": False}))
    frame = one.frame("execute", 1, timeout=None, context=None, file=str(file))
    one.send(frame)
    assert one.submitted(1) == {"n": 1_000_000}
    assert not file.exists()
    one.send(frame)  # the driver drops a repeated frame before it opens the file
    one.send(one.execution(2, "SUBMIT(fine=1)"))
    assert one.submitted(2) == {"fine": 1}


@pytest.mark.parametrize("folder", ["files", "missing", None])
def test_large_bodies_are_sent_as_files_if_the_settings_name_a_folder(
    launch: Launch, tmp_path: Path, folder: str | None
) -> None:
    place = tmp_path / "files"
    place.mkdir()
    one = launch().start(tmp_path, files=folder and str(tmp_path / folder))
    one.send(one.execution(1, "SUBMIT(text='x' * 300_000)"))
    header, body = one.until("end", 1)
    assert header["status"] == "submitted"
    if folder == "files":
        file = Path(header["file"])
        assert (file.parent, body) == (place, None)
        assert file.stat().st_mode & 0o077 == 0
        body = file.read_bytes()
    assert json.loads(body) == {"text": "x" * 300_000}
    one.send(one.execution(2, "SUBMIT(text='x' * 200_000)"))
    header, body = one.until("end", 2)
    assert "file" not in header
    assert len(body) > 200_000


def test_the_first_frames_may_precede_the_wire(launch: Launch, tmp_path: Path) -> None:
    settings, inside = tmp_path / "settings", tmp_path / "inside"
    settings.write_text(json.dumps(asdict(DriverSettings(cwd=".", heartbeat=None))))
    start = encode_frame({"op": "start", "id": 0, "n": 0, "file": str(settings)}).decode()
    boot = "import runpy, sys; driver = runpy.run_path(sys.argv[2]); driver['main'](first=sys.argv[1])"
    inside.mkdir()
    one = launch(sys.executable, "-c", boot, start, cwd=inside)
    one.until("ready")
    assert not settings.exists()
    one.n = 0
    one.send(one.execution(1, "import os; SUBMIT(cwd=os.getcwd())"))
    assert one.submitted(1) == {"cwd": os.path.realpath(inside)}
