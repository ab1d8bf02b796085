"""The option `--keep-failed`, and the command `shell`: a person looks into the sandbox of a failed execution."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ..infra.pseudo_terminal import TerminalCommand
from ..infra.waiting import HANG_SECONDS, wait_until
from .conftest import COMMAND, Run, environment

pytestmark = pytest.mark.usefixtures("one_keeps_containers")

CODE = "open('mine.txt', 'w').write('of the code')\nif x > 1:\n    raise ValueError('too large')\nSUBMIT(y=x)"
PROMPT = r"[$#] $"
PODMAN = pytest.param("container:podman", marks=[pytest.mark.requires("podman"), pytest.mark.full])


def start_run(run_alone: Run, folder: Path, provider: str, count: int = 2) -> tuple[str, str]:
    """Run a batch of which all executions but the first fail, and return the results' path and the messages."""
    (folder / "code.py").write_text(CODE)
    (folder / "in.jsonl").write_text("".join(json.dumps({"x": x}) + "\n" for x in range(1, count + 1)))
    options = ("--inputs", "in.jsonl", "--keep-failed", "--provider", provider, "--max-workers", "1")
    done = run_alone("batch", "code.py", *options)
    assert done.returncode == 1, done.stderr
    return done.stdout.splitlines()[-1].rpartition(": ")[2], done.stderr


def open_shell(folder: Path, path: str, number: int) -> TerminalCommand:
    return TerminalCommand([COMMAND, "shell", path, str(number)], cwd=folder, env=environment(folder))


def reap(run_alone: Run, provider: str, *options: str) -> subprocess.CompletedProcess[str]:
    done = run_alone("reap", "--provider", provider, *options)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("provider", ["local", PODMAN])
def test_a_person_looks_into_the_sandbox_of_a_failed_execution(
    run_alone: Run, tmp_path: Path, account: Callable[..., None], provider: str
) -> None:
    account(provider)
    path, messages = start_run(run_alone, tmp_path, provider)
    assert re.search(rf"its sandbox is kept until \S+ \S+: rlm-batch shell {path} 1", messages)
    with open_shell(tmp_path, path, 1) as terminal:
        terminal.wait_for(PROMPT)
        terminal.send("cat mine.txt\n")
        terminal.wait_for("of the code")
        terminal.wait_for(PROMPT)
        terminal.send("python3 -i .rlm-batch/inputs.py\n")
        terminal.wait_for(">>> ")
        terminal.send("import os; x * 21, tuple(os.get_terminal_size())\n")
        terminal.wait_for(r"\(42, \(100, 24\)\)")
        terminal.send("while os.get_terminal_size().lines == 24: pass\n\n")
        terminal.resize(31, 47)
        terminal.wait_for(">>> ")
        terminal.send("while True: print('busy')\n\n")
        terminal.wait_for("busy\r\nbusy")
        terminal.send("\x03")
        terminal.wait_for("KeyboardInterrupt")
        terminal.wait_for(">>> ")
        terminal.send("\x04")
        terminal.wait_for(PROMPT)
        terminal.send("echo changed >mine.txt; exit 7\n")
        assert terminal.wait() == 7
        assert "The sandbox is kept until" in terminal.output
        assert f"rlm-batch reap --kept --provider {provider.partition(':')[0]}" in terminal.output
    kept = reap(run_alone, provider)
    assert "no unused sandboxes" in kept.stdout
    assert re.search(r"of the failed execution 1 of flow run \S+, kept until", kept.stderr)
    with open_shell(tmp_path, path, 1) as terminal:
        terminal.wait_for(PROMPT)
        terminal.send("cat mine.txt\n")
        terminal.wait_for("changed")
        terminal.wait_for(PROMPT)
        terminal.send("\x04")
        assert terminal.wait() == 0
    assert "kept for a failed execution" in reap(run_alone, provider, "--kept").stdout
    with open_shell(tmp_path, path, 1) as terminal:
        assert terminal.wait() == 2
        assert f"is gone, because it was removed or its hour is over: rlm-batch rerun {path} 1" in terminal.output
        assert terminal.output.count("\n") == 1
    again = TerminalCommand([COMMAND, "rerun", path, "1"], cwd=tmp_path, env=environment(tmp_path))
    with again as terminal:
        terminal.wait_for("too large")
        assert terminal.wait() == 1
    reap(run_alone, provider, "--kept")


RECORDER = """#!/bin/sh
printf '%s\\n' "$@" "$MODAL_TOKEN_SECRET" >arguments
exit 7
"""
COMMANDS = [("daytona", "ssh", r"ssh -p 2222 TOKEN@ssh\.daytona\.example"), ("modal", "modal", r"modal shell sb-\w+")]


@pytest.mark.full
@pytest.mark.parametrize(("provider", "program", "shown"), COMMANDS)
def test_the_shell_is_the_providers_own(
    run_alone: Run,
    tmp_path: Path,
    account: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    provider: str,
    program: str,
    shown: str,
) -> None:
    """A program that records its arguments takes the place of the provider's."""
    account(provider)
    path, _ = start_run(run_alone, tmp_path, provider)
    (tmp_path / program).write_text(RECORDER)
    (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with open_shell(tmp_path, path, 1) as terminal:
        terminal.wait_for(shown)
        assert terminal.wait() == 7
    *arguments, secret = (tmp_path / "arguments").read_text().splitlines()
    if provider == "daytona":
        assert re.fullmatch(r"-p 2222 token-of-\S+@ssh\.daytona\.example", " ".join(arguments))
    else:
        assert re.fullmatch(r"shell sb-\w+ --cmd sh -c .*bash --norc.*", " ".join(arguments))
        assert secret == os.environ["MODAL_TOKEN_SECRET"]
    reap(run_alone, provider, "--kept")


def list_sleepers(seconds: str) -> list[str]:
    """Return the processes of this machine that run `sleep` with that argument."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes() == f"sleep\0{seconds}\0".encode():
                found.append(str(path))
    return found


@pytest.mark.parametrize("provider", ["local", PODMAN])
def test_a_terminated_shell_restores_the_terminal(
    run_alone: Run, tmp_path: Path, account: Callable[..., None], provider: str
) -> None:
    account(provider)
    path, _ = start_run(run_alone, tmp_path, provider)
    sleep = f"{os.getpid()}.{len(provider)}"
    with open_shell(tmp_path, path, 1) as terminal:
        settings = terminal.read_settings()
        terminal.wait_for(PROMPT)
        terminal.send(f"stty -echo; sleep {sleep}\n")
        wait_until(lambda: list_sleepers(sleep))
        assert terminal.read_settings() != settings
        os.kill(terminal.process.pid, signal.SIGTERM)
        assert terminal.wait() == 130
        assert terminal.read_settings() == settings
        assert "rlm-batch: interrupted\r\n" in terminal.output
    if provider == "local":  # A container has its own processes until its hour is over.
        wait_until(lambda: not list_sleepers(sleep))
    with open_shell(tmp_path, path, 1) as terminal:
        terminal.wait_for(PROMPT)
        terminal.send("cat mine.txt\n")
        terminal.wait_for("of the code")
        terminal.wait_for(PROMPT)
        terminal.close()
        assert terminal.process.wait(HANG_SECONDS) == 130
    reap(run_alone, provider, "--kept")


def test_a_run_says_if_a_kept_sandbox_has_no_variables(run_alone: Run, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("open('.rlm-batch', 'w').close()\nraise ValueError")
    done = run_alone("batch", "code.py", "--keep-failed", "--provider", "local:none")
    assert re.search(r"its sandbox is kept .*, without its variables \(.+\): rlm-batch shell", done.stderr)
    reap(run_alone, "local", "--kept")


def test_the_first_three_failures_of_a_run_are_kept(run_alone: Run, tmp_path: Path) -> None:
    path, messages = start_run(run_alone, tmp_path, "local:none", 6)
    assert messages.count("its sandbox is kept") == 3
    wrong = {
        "0": "the sandbox of execution 0 was not kept: --keep-failed keeps those of a run's first three "
        "failures, and with shards that of each shard's first",
        "5": "the sandbox of execution 5 was not kept",
        "9": "has no outcome of execution 9: rlm-batch report",
        "1": "shell needs a terminal",
    }
    for number, reason in wrong.items():
        done = run_alone("shell", path, number, stdin=subprocess.DEVNULL)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert reason in done.stderr
    assert "there is no run 'nothing'" in run_alone("shell", "nothing", "0").stderr
    assert "3 kept sandboxes of failed executions" in run_alone("doctor", "--json").stdout
    assert "3 sandboxes" in reap(run_alone, "local", "--kept").stdout
