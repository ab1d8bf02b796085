"""The record and the page of a run say how it was made, without secrets, and rerun needs no server for it."""

import asyncio
import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlm_batch.blocks.git import describe_checkout
from rlm_batch.tasks.ledger.run_record import read_known_runs

from ..infra.prefect_database import make_prefect_home
from .conftest import Run, environment
from .test_rerun import find_results

SECRETS = ("sk-of-the-option-17", "sk-by-its-name-18", "hunter2-in-the-environment")
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
CODE = f"""# <b>The code</b> of a run
import base64, os
with open("dot.png", "wb") as file:
    file.write(base64.b64decode({PICTURE!r}))
SUBMIT(y=x * 2, has_key=bool(os.environ["MY_KEY"]))
"""


def run_with_secrets(run: Run, tmp_path: Path) -> Path:
    """Run a batch with a name, tags and three secrets. Return its results."""
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "in.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
    options = ["--name", "first {run}", "--tag", "paper", "--tag", "draft", "--timeout", "77", "--collect", "*.png"]
    secrets = ["--env", f"API_TOKEN={SECRETS[0]}", "--secret", "MY_KEY", "--env", "MODE=fast"]
    own_environment = {**environment(tmp_path), "MY_KEY": SECRETS[1], "DB_PASSWORD": SECRETS[2]}
    done = run("batch", "code.py", "--inputs", "in.jsonl", *options, *secrets, env=own_environment)
    assert done.returncode == 0, done.stderr
    assert "Results of first {run}" in done.stdout
    return Path(find_results(done.stdout))


def test_a_colleague_opens_the_page_in_another_folder_and_finds_no_secret(run_alone: Run, tmp_path: Path) -> None:
    results = run_with_secrets(run_alone, tmp_path)
    (tmp_path / "mine").mkdir()
    assert run_alone("report", "first {run}", "--html", "mine/page.html").returncode == 0
    (tmp_path / "theirs").mkdir()
    page = (tmp_path / "mine" / "page.html").rename(tmp_path / "theirs" / "page.html").read_text()
    shutil.rmtree(results)
    text = html.unescape(re.sub("<[^>]+>", "\n", page))
    assert CODE in text
    for part in (
        "first {run}",
        "draft",
        "paper",
        "rlm-batch batch code.py",
        "'MODE': 'fast'",
        "\n77\n",
        "Python 3.",
        "local",
    ):
        assert part in text, part
    assert re.search(r"SHA-256 of code\s+[0-9a-f]{64}", text)
    assert "<b>The code" not in page
    pictures = re.findall(r'<img[^>]* src="([^"]+)"', page)
    assert f"data:image/png;base64,{PICTURE}" in pictures
    assert all(picture.startswith("data:") for picture in pictures)
    assert not [secret for secret in SECRETS if secret in page]


def test_no_file_of_the_run_has_a_secret(run_alone: Run, tmp_path: Path) -> None:
    results = run_with_secrets(run_alone, tmp_path)
    assert run_alone("report", str(results)).returncode == 0
    files = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert {"report.html", "dot.png"} <= {path.name for path in files}
    for path in files:
        assert not [secret for secret in SECRETS if secret.encode() in path.read_bytes()], path
    runs = json.loads(run_alone("runs", "--json").stdout)
    assert (runs["name"], sorted(runs["tags"])) == ("first {run}", ["draft", "paper"])


def test_a_run_is_repeated_without_its_server_but_not_by_the_record_of_another_person(
    run_alone: Run, tmp_path: Path
) -> None:
    (tmp_path / "code.py").write_text("print('x is', x)\nSUBMIT(y=x)")
    rows = [{"x": x, "text": "long" * 100} for x in range(100)]
    (tmp_path / "in.json").write_text(json.dumps(rows))
    results = find_results(run_alone("batch", "code.py", "--inputs", "in.json").stdout)
    other = {name: value for name, value in environment(tmp_path).items() if name != "PREFECT_API_URL"}
    other["PREFECT_HOME"] = str(make_prefect_home(tmp_path / "home"))
    done = run_alone("rerun", results, "7", env=other)
    assert (done.returncode, "x is 7" in done.stderr) == (0, True), done.stderr
    copy = str(shutil.copytree(results, tmp_path / "of another person"))
    other["RLM_BATCH_RESULTS"] = str(tmp_path / "other results")
    done = run_alone("rerun", copy, "7", env=other)
    assert (done.returncode, "the Prefect server has no flow run" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("words", [["--name", ""], ["--name", "a/b"], ["--tag", "a\nb"]])
def test_a_wrong_name_or_tag_is_one_sentence(run: Run, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "code.py").write_text("SUBMIT(y=1)")
    done = run("batch", "code.py", *words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "cannot be a name or a tag of a run" in done.stderr


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=me", "-c", "user.email=me@example.com", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_commit_and_changes_are_found_and_no_program_of_the_repository_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert asyncio.run(describe_checkout()) == ""
    git(tmp_path, "init", "-q")
    assert asyncio.run(describe_checkout()) == ""
    (tmp_path / "code.py").write_text("one")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert asyncio.run(describe_checkout()) == commit
    (tmp_path / "code.py").write_text("two")
    mark = tmp_path.with_name("ran")
    program = f"sh -c 'echo ran >>{mark}; cat'"
    git(tmp_path, "config", "core.fsmonitor", program)
    (tmp_path / ".git" / "hooks" / "post-index-change").write_text(f"#!/bin/sh\necho hook >>{mark}\n")
    os.chmod(tmp_path / ".git" / "hooks" / "post-index-change", 0o755)
    assert asyncio.run(describe_checkout()) == f"{commit}, with changes"
    (tmp_path / ".gitattributes").write_text("*.py filter=own\n")
    (tmp_path / "settings").write_text(f'[filter "own"]\nclean = {json.dumps(program)}\n')
    git(tmp_path, "config", "include.path", str(tmp_path / "settings"))
    (tmp_path / "code.py").write_text("three")
    assert asyncio.run(describe_checkout()) == f"{commit}, perhaps with changes"
    assert not mark.exists(), mark.read_text()


SCRIPT = """
import json, os, sys
from rlm_batch import batch
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
print(batch.sync("SUBMIT(y=1)", provider="local:none").results_path)
sys.argv = []
batch.sync("SUBMIT(y=1)", provider="local:none")
"""


def test_the_command_of_a_script_has_no_secrets_and_a_deleted_folder_stops_no_run(tmp_path: Path) -> None:
    secrets = ["password-in-an-address", "first-key-11", "second-key-22", "bearer-key-33"]
    words = [f"db://me:{secrets[0]}@host", "--api-key", secrets[1], "--api-key", secrets[2]]
    words.append(f"Authorization: Bearer {secrets[3]}")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", *words]
    own_environment = {**environment(tmp_path), "MY_PASSWORD": "provider"}  # also the name of a parameter
    printed = subprocess.check_output(command, cwd=tmp_path, env=own_environment, text=True, timeout=120)
    (path,) = Path(printed.strip()).glob("run-*.json")
    assert not [secret for secret in secrets if secret in path.read_text()]
    origin = json.loads(path.read_text())["origin"]
    assert origin["facts"]["Command"].startswith("script.py ")
    assert origin["parameters"]["provider"] == "local:none"


def test_a_damaged_origin_makes_no_report_fail(run_alone: Run, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("SUBMIT(y=1)")
    results = Path(find_results(run_alone("batch", "code.py").stdout))
    (record,) = results.glob("run-*.json")
    fields = json.loads(record.read_text())
    fields["origin"] = {"parameters": 5, "code": ["x"]}
    record.write_text(json.dumps(fields))
    assert run_alone("report", str(results)).returncode == 0
    assert read_known_runs(tmp_path / "results").records == []
