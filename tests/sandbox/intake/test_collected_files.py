"""Tests that collected files are written below one directory only, whatever an attacked sandbox sends."""

import base64
import json
import os
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rlm_batch.sandbox.intake import collected_files
from rlm_batch.sandbox.intake.collected_files import FOREIGN, CollectedFiles

PATTERNS = ["*.png", "out/**"]


def send(collected: CollectedFiles, path: Any, data: bytes = b"mine", last: Any = True) -> None:
    collected.take(json.dumps({"path": path, "data": base64.b64encode(data).decode(), "last": last}).encode())


PATHS = [
    "../x.png", "/tmp/x.png", "out/../../x.png", "out//x", "out/./x", "", ".", "x\0.png", "x\n.png", "\udc80.png",
    "other.txt", "out/" + "d/" * 60 + "x", "out/" + "x" * 300, "a.png", 3, None,
]  # fmt: skip
BODIES = [
    b"", b"3", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"path":"b.png","data":"***","last":true}',
    b'{"path":"b.png","data":"bWluZQ==","last":1}', b'{"path":"b.png","reason":3}', b'"' + b"x" * 300_000 + b'"',
]  # fmt: skip


def test_an_unrequested_path_ends_the_collection_and_keeps_existing_files(tmp_path: Path) -> None:
    for number, path in enumerate(PATHS):
        home = tmp_path / str(number) / "home"
        collected = CollectedFiles(PATTERNS, home)
        send(collected, "a.png")
        send(collected, path)  # the paths include a second `a.png`
        send(collected, "b.png")
        collected.finish()
        assert (collected.paths, collected.problems) == ([str(home / "a.png")], [FOREIGN]), path
        assert [item.name for item in home.parent.rglob("*")] == ["home", "a.png"], path


def test_an_invalid_piece_of_a_file_ends_the_collection(tmp_path: Path) -> None:
    for body in BODIES:
        collected = CollectedFiles(PATTERNS, tmp_path)
        send(collected, "half.png", last=False)
        collected.take(body)
        collected.finish()
        assert (collected.paths, collected.problems, os.listdir(tmp_path)) == ([], [FOREIGN], []), body[:50]


def test_the_collection_follows_no_link_and_keeps_its_size_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (elsewhere / "b").write_text("theirs")
    (home / "a.png").symlink_to(elsewhere / "b")
    (home / "out").symlink_to(elsewhere)
    collected = CollectedFiles(PATTERNS, home)
    send(collected, "a.png")
    send(collected, "out/c")
    collected.finish()
    assert (home / "a.png").read_text() == "mine"
    assert not (home / "a.png").is_symlink()
    assert collected.problems == [f"out/c could not be written to {home}: Not a directory"]
    assert [item.name for item in elsewhere.iterdir()] == ["b"]
    assert (elsewhere / "b").read_text() == "theirs"
    monkeypatch.setattr(collected_files, "MAX_COLLECTED_BYTES", 10)
    collected = CollectedFiles(PATTERNS, tmp_path / "few")
    for name in ("a.png", "b.png", "c.png"):
        send(collected, name)
    collected.finish()
    assert (len(collected.paths), collected.problems, len(os.listdir(tmp_path / "few"))) == (2, [FOREIGN], 2)
    monkeypatch.setattr(collected_files, "MAX_COLLECTED_FILES", 1)
    collected = CollectedFiles(PATTERNS, tmp_path / "one")
    for name in ("a.png", "b.png"):
        send(collected, name, b"")
    collected.finish()
    assert (len(collected.paths), collected.problems) == (1, [FOREIGN])


def test_an_interrupt_while_the_writer_starts_ends_the_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(thread: Thread) -> None:
        raise KeyboardInterrupt

    collected = CollectedFiles(PATTERNS, tmp_path)
    monkeypatch.setattr(Thread, "start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        send(collected, "a.png")
    collected.finish()
    assert (collected.paths, collected.problems) == ([], [])
