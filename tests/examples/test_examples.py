"""The examples, run as programs: trajectories for other programs, and the counts of words."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import CodeError, Failure, Result
from rlm_batch.sandbox.meta import Meta, QuerySummary

from ..cli.conftest import write_run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
USED = {"calls": 1, "prompt_tokens": 100, "completion_tokens": 10, "cost": 0.5}
FLAT = {"kind": "llm_query", "depth": 3, "model": "small", "prompt": "one?", "seconds": 0.5, "turn": 2, **USED}


def build_query(prompt: str, turns: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    query = {"kind": "rlm_query", "depth": 1, "model": "large", "prompt": prompt, "seconds": 3.0, **USED}
    return {**query, "trajectory": turns, **more}


def build_meta(index: int, *tree: dict[str, Any]) -> Meta:
    return Meta(index=index, queries=QuerySummary(asked=len(tree), tree=tree))


def test_an_answers_trajectory_has_turns_usage_and_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = build_query("What of this part?", [{"code": "SUBMIT(answer='a')", "output": "\ud800"}], depth=2, turn=2)
    turns = [
        {"reasoning": "I divide.", "code": "1 / 0", "output": "ZeroDivisionError", "usage": USED, "failed": True},
        {"code": "print(rlm_query(part), llm_query('one?'))", "output": "a b"},
    ]
    record = build_query("Which of them?", turns, queries=[below, FLAT])
    ended = build_query("z", [], error="BudgetExceeded: all used up", cost=None)
    outcomes = [Result({}, build_meta(0, record, ended)), Failure(CodeError("no"), build_meta(1, FLAT))]
    write_run(tmp_path / "run", outcomes)
    monkeypatch.setattr("sys.argv", ["trajectories.py", str(tmp_path / "run"), str(tmp_path / "out")])
    runpy.run_path(str(EXAMPLES / "trajectories.py"), run_name="__main__")
    files = {path.name: json.loads(path.read_text("utf-8")) for path in (tmp_path / "out").iterdir()}
    assert sorted(files) == ["trajectory-0-1.json", "trajectory-0-2.json"]
    trajectory = files["trajectory-0-1.json"]
    user, failed, asked = trajectory["steps"]
    assert (user["source"], user["message"]) == ("user", "Which of them?")
    assert failed["reasoning_content"] == "I divide."
    assert failed["tool_calls"][0]["arguments"] == {"code": "1 / 0"}
    assert failed["metrics"] == {"prompt_tokens": 100, "completion_tokens": 10, "cost_usd": 0.5}
    (result,) = asked["observation"]["results"]
    assert (result["content"], result["extra"]["llm_queries"]) == ("a b", [FLAT])
    (subagent,) = trajectory["subagent_trajectories"]
    assert result["subagent_trajectory_ref"] == [{"trajectory_id": subagent["trajectory_id"]}]
    assert subagent["steps"][0]["message"] == "What of this part?"
    assert trajectory["final_metrics"]["total_cost_usd"] == 0.5
    assert "all used up" in files["trajectory-0-2.json"]["steps"][1]["message"]
    assert "total_cost_usd" not in files["trajectory-0-2.json"]["final_metrics"]


@pytest.mark.full
def test_the_word_counts_example_prints_the_most_frequent_words(
    server: str,
    volumes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path / "results"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "word_counts.py"), run_name="__main__")
    assert "  the\n" in capsys.readouterr().out
