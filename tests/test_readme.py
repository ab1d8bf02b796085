"""What the README says runs as it says."""

import re
import shlex
from pathlib import Path

import pytest

from .standins.openai_chat import ChatServer
from .standins.turns import plays

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
PROGRAMS = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "rlm_batch" in block]
COMMANDS = [line for block in re.findall(r"```\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda text: text.splitlines()[-1][:40])
def test_a_program_runs(
    program: str,
    server: str,
    chat: ChatServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Where it asks a model of OpenAI's, or wants an account, a server here answers in its place."""
    if "Daytona" in program:
        request.getfixturevalue("daytona")
    if "Modal" in program:
        hello = request.getfixturevalue("modal_standin").hello
        monkeypatch.setenv("MODAL_TOKEN_ID", hello["token_id"])
        monkeypatch.setenv("MODAL_TOKEN_SECRET", hello["token_secret"])
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path))
    monkeypatch.setenv("RLM_BATCH_VOLUMES", str(tmp_path / "volumes"))
    monkeypatch.setenv("OPENAI_API_BASE", chat.url)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-x")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.txt").write_text("a long report\n" * 1000)
    chat.script = plays(("", "SUBMIT(answer=str(len(globals().get('context', ''))))"))
    exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("rlm-batch ")])
def test_a_command_is_one_that_there_is(command: str) -> None:
    from rlm_batch.cli.app import app

    app.parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)


@pytest.mark.parametrize("target", [line.split()[1] for line in COMMANDS if line.startswith("make ")])
def test_a_target_is_in_the_makefile(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
