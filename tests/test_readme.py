"""What the README says runs as it says."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from .infra.scripted_turns import plays
from .standins.openai_chat import ChatServer

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
PROGRAMS = [block for language, block in BLOCKS if language == "python" and "rlm_batch" in block]
COMMANDS = [line for language, block in BLOCKS if not language for line in block.splitlines()]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda text: text.splitlines()[-1][:40])
def test_a_program_runs(
    program: str,
    server: str,
    openai: ChatServer,
    account: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it asks a model of OpenAI's, or wants an account, a server here answers in its place."""
    account(*(name for name in ("daytona", "modal") if name.title() in program))
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path))
    monkeypatch.setenv("RLM_BATCH_VOLUMES", str(tmp_path / "volumes"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.txt").write_text("a long report\n" * 1000)
    openai.script = plays(("", "SUBMIT(answer=str(len(globals().get('context', ''))))"))
    exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(
    "code", [block for language, block in BLOCKS if language == "python" and "rlm_batch" not in block]
)
def test_code_for_a_sandbox_runs_in_one(code: str) -> None:
    from rlm_batch import LocalInterpreter

    with LocalInterpreter(isolation="none") as interpreter:
        assert interpreter.execute(code, {"lr": 0.01, "batch_size": 64}).loss > 0


FILES = {
    **{f"{name}.py": f"SUBMIT(name={name!r})" for name in ("one", "two", "load", "fit", "report")},
    "code.py": "SUBMIT(y=x * x)",
    "inputs.jsonl": '{"x": 1}\n{"x": 2}\n',
    "count.py": "save_to_volume(f'results/{chunk_id}', str(len(data))); SUBMIT(count=len(data))",
    "table.py": "save_to_volume('results/table.json', str(sum(fields['count'] for fields in results.values())))",
    "rows.jsonl": "".join(f'{{"n": {n}}}\n' for n in range(250)),
    "report.txt": "a long report\n" * 1000,
}
# Those that need a port, change the server or want workers are run by `tests/cli/test_up.py`, `tests/deployments` and
# `tests/flows/test_shards.py`.
ELSEWHERE = re.compile("rlm-batch (up|deploy)|.* --shards ")
RUNS = [line for line in COMMANDS if line.startswith("rlm-batch ") and not ELSEWHERE.match(line)]


def test_the_commands_run_one_after_the_other(
    server: str,
    daytona: object,
    openai: ChatServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from rlm_batch.cli.app import app

    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("RLM_BATCH_VOLUMES", str(tmp_path / "volumes"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    openai.script = plays(("", "SUBMIT(answer=str(len(globals().get('context', ''))))"))
    assert len(RUNS) >= 12
    for command in RUNS:
        words = shlex.split(command)[1:]
        if "RUN" in words:
            runs = sorted((tmp_path / "results").iterdir(), key=lambda path: path.stat().st_mtime)
            words[words.index("RUN")] = str(next(path for path in reversed(runs) if path.is_dir()))
        status = app(words, exit_on_error=False, result_action="return_value")
        assert status in (None, 0), f"{command}: {capfd.readouterr()}"


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("rlm-batch ")])
def test_a_command_is_one_that_there_is(command: str) -> None:
    from rlm_batch.cli.app import app

    app.parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)


@pytest.mark.parametrize("target", [line.split()[1] for line in COMMANDS if line.startswith("make ")])
def test_a_target_is_in_the_makefile(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
