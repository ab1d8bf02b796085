"""Files come home below one directory, whatever a sandbox that is not ours any more sends in their place."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlm_batch.sandbox.intake import collected_files
from rlm_batch.sandbox.intake.collected_files import FOREIGN, CollectedFiles

PATTERNS = ["*.png", "out/**"]


def send(collected: CollectedFiles, path: Any, data: bytes = b"mine", last: Any = True) -> None:
    collected.take(json.dumps({"path": path, "data": base64.b64encode(data).decode(), "last": last}).encode())


@pytest.mark.parametrize(
    "path",
    [
        "../x.png", "/tmp/x.png", "out/../../x.png", "out//x", "out/./x", "", ".", "x\0.png", "x\n.png", "\udc80.png",
        "other.txt", "out/" + "d/" * 60 + "x", "out/" + "x" * 300, "a.png", 3, None,
    ],
)  # fmt: skip
def test_a_path_that_was_not_asked_for_ends_it_and_what_was_there_stays(path: Any, tmp_path: Path) -> None:
    collected = CollectedFiles(PATTERNS, tmp_path / "home")
    send(collected, "a.png")
    send(collected, path)  # one of them a second time
    send(collected, "b.png")
    assert (collected.paths, collected.problems) == ([str(tmp_path / "home/a.png")], [FOREIGN])
    assert [item.name for item in tmp_path.rglob("*")] == ["home", "a.png"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"3", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"path":"b.png","data":"***","last":true}',
        b'{"path":"b.png","data":"bWluZQ==","last":1}', b'{"path":"b.png","reason":3}', b'"' + b"x" * 300_000 + b'"',
    ],
)  # fmt: skip
def test_what_is_no_piece_of_a_file_ends_it(body: bytes, tmp_path: Path) -> None:
    collected = CollectedFiles(PATTERNS, tmp_path)
    send(collected, "half.png", last=False)
    collected.take(body)
    assert (collected.paths, collected.problems, os.listdir(tmp_path)) == ([], [FOREIGN], [])


def test_no_link_in_the_directory_is_followed_and_no_more_is_taken_than_fits(
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
    assert (home / "a.png").read_text() == "mine"
    assert not (home / "a.png").is_symlink()
    assert collected.problems == [f"out/c could not be written to {home}: Not a directory"]
    assert [item.name for item in elsewhere.iterdir()] == ["b"]
    assert (elsewhere / "b").read_text() == "theirs"
    monkeypatch.setattr(collected_files, "MAX_COLLECTED_BYTES", 10)
    collected = CollectedFiles(PATTERNS, tmp_path / "few")
    for name in ("a.png", "b.png", "c.png"):
        send(collected, name)
    assert (len(collected.paths), collected.problems, len(os.listdir(tmp_path / "few"))) == (2, [FOREIGN], 2)
    monkeypatch.setattr(collected_files, "MAX_COLLECTED_FILES", 1)
    collected = CollectedFiles(PATTERNS, tmp_path / "one")
    for name in ("a.png", "b.png"):
        send(collected, name, b"")
    assert (len(collected.paths), collected.problems) == (1, [FOREIGN])
