"""Tests of frames whose bodies are files, and of frames that the driver gets before it reads the wire."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

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


def test_large_bodies_are_sent_as_files_that_the_driver_names(launch: Launch, tmp_path: Path) -> None:
    place = tmp_path / "files"
    place.mkdir()
    one = launch().start(tmp_path, files=str(place))
    one.send(one.execution(1, "SUBMIT(text='x' * 300_000)"))
    header, body = one.until("end", 1)
    assert (header["status"], body) == ("submitted", None)
    file = Path(header["file"])
    assert file.parent == place
    assert file.stat().st_mode & 0o077 == 0
    assert json.loads(file.read_text()) == {"text": "x" * 300_000}
    one.send(one.execution(2, "SUBMIT(text='x' * 200_000)"))
    header, body = one.until("end", 2)
    assert "file" not in header
    assert len(body) > 200_000


def test_a_large_body_uses_the_wire_without_a_folder_for_files(launch: Launch, tmp_path: Path) -> None:
    for files in (None, str(tmp_path / "not there")):
        one = launch().start(tmp_path, files=files)
        one.send(one.execution(1, "SUBMIT(text='x' * 300_000)"))
        assert one.submitted(1) == {"text": "x" * 300_000}


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
