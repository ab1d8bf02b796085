"""Only what the host has written counts as its marker, in the one place that it was written for."""

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlm_batch import ConfigurationError, LocalSandbox
from rlm_batch.tasks.ledger.marker_signature import MarkerSigner, load_marker_key

KEY = "0123456789abcdef0123456789abcdef"
TEXT = '{"version":1,"key":"11","outputs":{"x":"\u00fc"},"submitted":true,"files":[]}'
SIGNED = TEXT[:-1] + ',"hmac":"49869159ea7d9412ff040154c7b8fa7a178bc38ad7353f2c8fe0c8e2a7337aae"}'


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory of the test's own, and no key in the environment."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("RLM_BATCH_MARKER_KEY", raising=False)
    return tmp_path / "rlm-batch"


@pytest.fixture
def signer(monkeypatch: pytest.MonkeyPatch) -> MarkerSigner:
    monkeypatch.setenv("RLM_BATCH_MARKER_KEY", KEY)
    return MarkerSigner.for_volume_of(LocalSandbox(volume_name="numbers"))


def test_a_marker_that_was_signed_today_is_so_in_later_versions(signer: MarkerSigner) -> None:
    assert signer.sign("folder/a.json", TEXT) == SIGNED
    assert signer.is_signed("folder/a.json", SIGNED)
    assert KEY not in repr(signer)


def test_a_marker_counts_at_its_own_place_and_under_its_own_key_alone(signer: MarkerSigner) -> None:
    text = signer.sign("folder/a.json", TEXT)
    assert signer.is_signed("folder/a.json", text)
    assert not signer.is_signed("folder/b.json", text)
    assert not signer.is_signed("other/a.json", text)
    assert not replace(signer, volume="others").is_signed("folder/a.json", text)
    assert not replace(signer, provider="modal").is_signed("folder/a.json", text)
    assert not replace(signer, _key=b"another key").is_signed("folder/a.json", text)


def test_no_letter_of_it_can_be_changed(signer: MarkerSigner) -> None:
    text = signer.sign("folder/a.json", TEXT)
    assert signer.is_signed("folder/a.json", text)
    for changed in (
        text.replace('"11"', '"12"'),
        text.replace('"key"', '"key":"13","key"'),
        text.replace('"hmac":"', '"hmac":"0'),
        text[:-66] + "\u00e9" * 64 + '"}',
        text + " ",
        text[:-1] + ',"outputs":{"x":1}}',
        text[:-1] + "," + text[1:],
        TEXT,
        "",
        '{"hmac":""}',
    ):
        assert not signer.is_signed("folder/a.json", changed)


def test_the_key_is_a_file_of_this_user_alone_and_stays(data_dir: Path) -> None:
    key = load_marker_key()
    assert len(key) == 64
    assert load_marker_key() == key
    assert [path.name for path in data_dir.iterdir()] == ["marker.key"]
    assert stat.S_IMODE((data_dir / "marker.key").stat().st_mode) == 0o600


def test_processes_that_need_a_key_at_the_same_time_get_the_same() -> None:
    program = """
import os
from rlm_batch.tasks.ledger.marker_signature import load_marker_key
reads, writes = os.pipe()
for _ in range(8):
    if os.fork() == 0:
        os.close(writes)
        os.read(reads, 1)
        os.write(1, load_marker_key() + b"\\n")
        os._exit(0)
os.close(writes)
for _ in range(8):
    os.wait()
"""
    command = [sys.executable, "-c", program]
    keys = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert keys == [load_marker_key().decode()] * 8


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_others_can_read_is_refused(data_dir: Path, mode: int) -> None:
    load_marker_key()
    (data_dir / "marker.key").chmod(mode)
    with pytest.raises(ConfigurationError, match=f"is not this user's alone .*mode {mode:o}"):
        load_marker_key()


@pytest.mark.requires("root")
def test_a_key_that_belongs_to_another_user_is_refused(data_dir: Path) -> None:
    load_marker_key()
    os.chown(data_dir / "marker.key", 12345, -1)
    with pytest.raises(ConfigurationError, match="owner 12345"):
        load_marker_key()


def test_a_damaged_key_is_refused(data_dir: Path) -> None:
    load_marker_key()
    (data_dir / "marker.key").write_text("")
    with pytest.raises(ConfigurationError, match="is damaged: delete it"):
        load_marker_key()


def test_where_no_key_can_be_made_the_error_names_the_variable(data_dir: Path) -> None:
    data_dir.write_text("a file")
    with pytest.raises(ConfigurationError, match=r"can be neither read nor made .*set RLM_BATCH_MARKER_KEY"):
        load_marker_key()
