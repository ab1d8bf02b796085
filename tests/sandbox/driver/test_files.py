"""Frames whose bodies are files, the frames that come before the wire, and bodies that a wire would hold back."""

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


def test_a_body_may_be_a_file_which_is_gone_once_it_was_read(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path)
    body = {
        "code": "SUBMIT(n=len(text))",
        "variables": {"text": "x" * 1_000_000},
        "names": [],
        "output_fields": None,
        "queries": False,
    }
    file = tmp_path / "body"
    file.write_text(json.dumps(body))
    frame = one.frame("execute", 1, timeout=None, context=None, file=str(file))
    one.send(frame)
    assert one.submitted(1) == {"n": 1_000_000}
    assert not file.exists()
    one.send(frame)  # that comes again is dropped before its file is asked for
    one.send(one.execution(2, "SUBMIT(fine=1)"))
    assert one.submitted(2) == {"fine": 1}


def test_large_bodies_are_left_as_files_that_only_the_driver_names(launch: Launch, tmp_path: Path) -> None:
    place = tmp_path / "files"
    place.mkdir()
    one = launch().start(tmp_path, files=str(place))
    one.send(one.execution(1, "SUBMIT(text='x' * 300_000)"))
    header, body = one.until("end", 1)
    assert header["status"] == "submitted"
    assert body is None
    file = Path(header["file"])
    assert file.parent == place
    assert file.stat().st_mode & 0o077 == 0
    assert json.loads(file.read_text()) == {"text": "x" * 300_000}
    one.send(one.execution(2, "SUBMIT(text='x' * 200_000)"))
    header, body = one.until("end", 2)
    assert "file" not in header
    assert len(body) > 200_000


def test_where_no_file_can_be_made_a_large_body_goes_over_the_wire(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path, files=str(tmp_path / "not there"))
    one.send(one.execution(1, "SUBMIT(text='x' * 300_000)"))
    assert one.submitted(1) == {"text": "x" * 300_000}


def test_without_a_place_for_files_everything_goes_over_the_wire(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path)
    one.send(one.execution(1, "SUBMIT(text='x' * 300_000)"))
    assert one.submitted(1) == {"text": "x" * 300_000}


def test_no_body_is_shorter_than_what_a_wire_may_hold_back(launch: Launch, tmp_path: Path) -> None:
    one = launch().start(tmp_path)
    token = "import gc; gc.unfreeze(); token = next(o for o in gc.get_objects() if type(o).__name__ == 'Channel').token"
    frame = (
        "import json, os; os.write(4, json.dumps({'op': 'submit', 'token': token, 'body': 1}).encode() + b'\\n1\\n')"
    )
    one.send(one.execution(1, f"{token}\n{frame}"))
    header, body = one.until("end", 1)
    assert (header["status"], body) == ("submitted", b"1 ")


def test_the_first_frames_may_be_there_before_the_wire(launch: Launch, tmp_path: Path) -> None:
    settings = tmp_path / "settings"
    values = asdict(DriverSettings(cwd=".", heartbeat=None))
    settings.write_text(json.dumps(values))
    start = encode_frame({"op": "start", "id": 0, "n": 0, "file": str(settings)}).decode()
    boot = "import runpy, sys; driver = runpy.run_path(sys.argv[2]); driver['main'](first=sys.argv[1])"
    inside = tmp_path / "inside"
    inside.mkdir()
    one = launch(sys.executable, "-c", boot, start, cwd=inside)
    one.until("ready")
    assert not settings.exists()
    one.n = 0
    one.send(one.execution(1, "import os; SUBMIT(cwd=os.getcwd())"))
    assert one.submitted(1) == {"cwd": os.path.realpath(inside)}
