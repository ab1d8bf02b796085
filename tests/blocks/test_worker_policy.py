"""The worker's file: who may own and write it, what it may contain, and where it is."""

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from rlm_batch import ConfigurationError
from rlm_batch.blocks import worker_policy
from rlm_batch.blocks.worker_consent import check_key_address, check_no_isolation
from rlm_batch.blocks.worker_policy import WorkerPolicy, list_policy_files, read_policy

from ..infra.consent import write_policy

OTHER_USER = 12345


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a worker's file with good rights, which allows to run without isolation."""
    path = tmp_path / "etc" / "worker.toml"
    write_policy(path, allow_no_isolation=True)
    monkeypatch.setattr(worker_policy, "MACHINE_FILE", path)
    return path


def test_without_a_file_nothing_is_allowed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.unlink()
    monkeypatch.setattr(worker_policy, "list_policy_files", lambda: [file])
    assert read_policy() == WorkerPolicy()
    assert not any(value for _, value in WorkerPolicy())


def test_the_home_is_that_of_the_password_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS", "USER", "LOGNAME"):
        monkeypatch.setenv(name, str(tmp_path))
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert list_policy_files() == [Path("/etc/rlm-batch/worker.toml"), Path(home, ".config/rlm-batch/worker.toml")]


def test_a_user_without_an_entry_has_the_machines_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", find_nobody)
    assert list_policy_files() == [Path("/etc/rlm-batch/worker.toml")]


@pytest.mark.usefixtures("as_worker")
@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_may_write_does_not_count(file: Path, mode: int) -> None:
    check_no_isolation()
    file.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"other users may change {file}: let root .* chmod go-w {file}"):
        check_no_isolation()


@pytest.mark.usefixtures("as_worker")
def test_a_directory_that_others_may_write_does_not_count(file: Path) -> None:
    file.parent.chmod(0o775)
    with pytest.raises(ConfigurationError, match=f"other users may change {file.parent}: "):
        check_no_isolation()


@pytest.mark.usefixtures("as_worker")
def test_a_link_into_a_directory_that_others_may_write_does_not_count(file: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    file.rename(shared / "worker.toml")
    file.symlink_to(shared / "worker.toml")
    check_no_isolation()
    shared.chmod(0o777)
    with pytest.raises(ConfigurationError, match=f"other users may change {shared}: "):
        check_no_isolation()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.usefixtures("as_worker")
def test_a_file_or_directory_of_another_user_does_not_count(file: Path) -> None:
    for place in (file, file.parent):
        os.chown(place, OTHER_USER, -1)
        with pytest.raises(ConfigurationError, match=f"other users may change {place}: "):
            check_no_isolation()
        os.chown(place, 0, -1)
    check_no_isolation()


@pytest.mark.usefixtures("as_worker")
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("allow_no_isolation = 1", "`allow_no_isolation` is 1: it should be a valid boolean"),
        ('allow_no_isolation = "true"', "`allow_no_isolation` is 'true': it should be a valid boolean"),
        ("allow_everything = true", "`allow_everything` is True: Extra inputs are not permitted"),
        ('allowed_paths = "/data"', "`allowed_paths` is '/data': it should be a valid list"),
        ('allowed_paths = ["~/data"]', r"`allowed_paths`\[0\] is '~/data': it should match pattern"),
        ("allow_no_isolation = ", "Invalid value"),
    ],
)
def test_wrong_content_allows_nothing_and_is_explained(file: Path, text: str, problem: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=f"{file}.* is wrong: {problem}.*Its keys are allow_no_isolation, "):
        check_no_isolation()


def test_a_wrong_file_does_not_concern_scripts(file: Path) -> None:
    file.write_text("nonsense")
    check_no_isolation()


@pytest.mark.usefixtures("as_worker")
def test_keys_go_to_exactly_the_named_addresses(allow: Callable[..., None]) -> None:
    allow(key_addresses=["https://models.example/v1/"])
    check_key_address("https://models.example/v1", "its key")
    for address in ("https://models.example/v2", "https://models.example/v1@evil.example", "http://models.example/v1"):
        with pytest.raises(ConfigurationError, match=r"this worker does not send its key to .* add the address"):
            check_key_address(address, "its key")
