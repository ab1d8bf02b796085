"""The command `rlm-batch rlm`, and the options on language models of the others."""

from pathlib import Path

import pytest

from ..infra.scripted_turns import make_script
from ..standins.openai_chat import ChatServer, Reply
from .conftest import Run

NAME = "openai/gpt-4o-mini"


@pytest.fixture(autouse=True)
def credentials(chat: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where LiteLLM finds the model's address and key."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-x")
    monkeypatch.setenv("OPENAI_API_BASE", chat.url)


def test_a_question_over_a_file_prints_the_answer_what_it_took_and_where_it_is(
    chat: ChatServer, run: Run, tmp_path: Path
) -> None:
    chat.script = make_script(("", "SUBMIT(answer='It has ' + str(len(context)) + ' characters')"))
    (tmp_path / "notes.txt").write_text("x" * 123_456)
    done = run("rlm", "How long is it?", "--context-file", "notes.txt", "--language-model", NAME)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "It has 123456 characters"
    assert done.stdout.splitlines()[1].startswith("Results: ")
    assert "1 turns; the model was called 1 times: " in done.stderr


@pytest.mark.full
def test_a_model_that_refuses_is_an_exit_status_of_one_and_a_sentence(chat: ChatServer, run: Run) -> None:
    chat.script = lambda _: Reply("the account is closed", status=403)
    done = run("rlm", "q", "--language-model", NAME)
    assert done.returncode == 1
    assert "the account is closed" in done.stderr
    assert 'Traceback (most recent call last):\n  File "/' not in done.stderr


@pytest.mark.full
def test_without_an_answer_what_the_model_printed_last_is_shown(chat: ChatServer, run: Run) -> None:
    chat.script = make_script(("", "print('found it')"))
    done = run("rlm", "q", "--language-model", NAME, "--max-llm-calls", "1")
    assert done.returncode == 1
    assert done.stdout.startswith("No answer. What the model printed last:\nfound it\n")
    assert "raise max_llm_calls" in done.stderr
    assert "1 turns; the model was called 1 times: " in done.stderr


@pytest.mark.full
def test_a_batch_may_ask_within_its_limits(chat: ChatServer, run: Run, tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text("SUBMIT(n=[str(a)[:4] for a in llm_query_batched(['a'] * 3, on_error='return')])")
    done = run("batch", "ask.py", "--language-model", NAME, "--max-llm-calls", "2", "--batch-concurrency", "1")
    assert done.returncode == 0, done.stderr
    assert "['answ', 'answ', 'all ']" in done.stdout
    assert chat.stats.most_at_once == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("rlm", "q"), "--language-model"),
        (("rlm", "q", "--language-model", NAME, "--context-file", "nosuch"), "nosuch cannot be read"),
        (("rlm", "q", "--language-model", NAME, "--max-depth", "-1"), "greater than or equal to 0"),
        (("rlm", "", "--language-model", NAME), "query"),
    ],
)
def test_wrong_usage_is_one_sentence(run: Run, arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
