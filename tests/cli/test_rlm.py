"""The command `rlm-batch rlm`, and the language model options of other commands."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from ..infra.scripted_turns import make_script
from ..standins.openai_chat import ChatServer, Reply
from .conftest import Run

MODEL = ("--language-model", "openai/gpt-4o-mini")


def test_a_question_about_a_file_prints_answer_usage_and_path(
    server: str, openai: ChatServer, run: Run, refused: Callable[..., str], tmp_path: Path
) -> None:
    openai.script = make_script(("", "SUBMIT(answer='It has ' + str(len(context)) + ' characters')"))
    (tmp_path / "notes.txt").write_text("x" * 123_456)
    done = run("rlm", "How long is it?", "--context-file", "notes.txt", *MODEL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "It has 123456 characters"
    assert done.stdout.splitlines()[1].startswith("Results of ")
    assert "1 turns; the model was called 1 times: " in done.stderr

    openai.script = make_script(
        ("Turns left", "SUBMIT('done')"), ("", "print('found\\x1b[31m it')\nllm_query('a')\n1 / 0")
    )
    openai.rule("", "b")
    done = run("rlm", "Which?", *MODEL)
    assert done.stdout.splitlines()[0] == "done"
    turns = [line for line in done.stderr.splitlines() if line.startswith("turn ")]
    failed = r"turn 1: Let me see. -> failed: ZeroDivisionError: division by zero \(1 query, \d+\.\d s, \$0\.\d{4}\)"
    assert re.fullmatch(failed, turns[0])
    assert turns[1].startswith("turn 2: Let me see. -> FINAL: 'done' (")

    questions = ("--queries", "questions.txt", "--record", "full", "--results-path", "all")
    (tmp_path / "questions.txt").write_text("Which?\nWhat?\n")
    done = run("rlm", *questions, *MODEL)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("question ")]
    assert sorted(line.partition(": ")[0] for line in lines) == [
        f"question {number}, turn {turn}" for number in (0, 1) for turn in (1, 2)
    ]
    assert run("report", "all", "--messages", "messages.jsonl").returncode == 0
    conversations = [json.loads(line) for line in (tmp_path / "messages.jsonl").read_text().splitlines()]
    assert [(line["execution"], line["kind"]) for line in conversations] == [
        (0, "rlm_query"), (0, "llm_query"), (1, "rlm_query"), (1, "llm_query")
    ]  # fmt: skip

    openai.script = make_script(("", "print('found it')"))
    done = run("rlm", "q", *MODEL, "--max-llm-calls", "1")
    assert done.returncode == 1
    assert done.stdout.startswith("No answer. The model's last output:\nfound it\n")
    assert "raise --max-llm-calls" in done.stderr

    done = run("rlm", "q", *MODEL, "--max-turns", "1")  # The last reply is the same code, which is not run.
    assert done.returncode == 1
    assert done.stdout.startswith("No answer. The model's last output:\nfound it\n")
    assert "submitted no answer in 1 turns (--max-turns): found it" in done.stderr

    openai.script = lambda _: Reply("the account is closed", status=403)
    done = run("rlm", "q", *MODEL)
    assert done.returncode == 1
    assert "the account is closed" in done.stderr
    assert "rlm_batch" not in done.stderr, "a traceback of ours"

    (tmp_path / "ask.py").write_text("SUBMIT(n=[str(a)[:4] for a in llm_query_batched(['a'] * 3, on_error='return')])")
    openai.script = lambda _: Reply("answer")
    done = run("batch", "ask.py", *MODEL, "--max-llm-calls", "2", "--batch-concurrency", "1")
    assert "['answ', 'answ', 'all ']" in done.stdout, done.stderr

    assert "nosuch" in refused("rlm", "q", *MODEL, "--context-file", "nosuch")
    assert "greater than or equal to 0" in refused("rlm", "q", *MODEL, "--max-depth", "-1")


def test_questions_from_a_file_print_a_table_of_answers(
    server: str, openai: ChatServer, run: Run, tmp_path: Path
) -> None:
    openai.script = make_script(("", "SUBMIT({name: len(text) for name, text in context.items()})"))
    (tmp_path / "questions.txt").write_text("What is first?\n\nWhat is second?\n")
    (tmp_path / "a.txt").write_text("x" * 3)
    (tmp_path / "b.txt").write_text("x" * 4)
    (tmp_path / "schema.json").write_text('{"type": "object", "additionalProperties": {"type": "integer"}}')
    files = ("--context-file", "a.txt", "--context-file", "b.txt", "--output-type", "schema.json")
    done = run("rlm", "--queries", "questions.txt", *files, *MODEL)
    assert done.returncode == 0, done.stderr
    assert re.search(r'0 +What is first\? .* \{"a.txt": 3, "b.txt": 4\} +1 +\$', done.stdout)
    assert "2 questions; the model was called 2 times: " in done.stderr
    path = done.stdout.splitlines()[-1].partition(": ")[2]
    report = run("report", path)
    assert re.search(r"1 +What is second\? .*a.txt.*3", report.stdout), report.stdout
    assert "2 of 2 questions succeeded" in report.stderr

    (tmp_path / "rows.csv").write_text("query,context_file\n1,a.txt\n2,b.txt\n")
    openai.script = make_script(("", "SUBMIT(len(context))"))
    done = run("rlm", "--inputs", "rows.csv", "--json", *MODEL)
    assert [json.loads(line)["outputs"] for line in done.stdout.splitlines()] == [{"answer": "3"}, {"answer": "4"}]
    done = run("rlm", "--queries", "questions.txt", "q", *MODEL)
    assert "pass one of QUERY, --queries or --inputs" in done.stderr
