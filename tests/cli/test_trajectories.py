"""`rlm-batch report --atif`, which writes a run's trajectories for other programs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlm_batch import CodeError, Failure, Result
from rlm_batch.sandbox.meta import Meta, QuerySummary

from .conftest import Run, write_run

QUESTION = "Which of them is it, and why? " * 10
FLAT = {"kind": "llm_query", "depth": 3, "model": "small", "prompt": "one?", "seconds": 0.5}
USED = {"calls": 1, "prompt_tokens": 100, "completion_tokens": 10, "cost": 0.5}


def build_turn(code: str, output: str, **more: Any) -> dict[str, Any]:
    return {"reasoning": f"I do {code}.", "code": code, "output": output, "usage": USED, **more}


def build_query(prompt: str, turns: list[dict[str, Any]], calls: int, **more: Any) -> dict[str, Any]:
    counts = {"calls": calls, "prompt_tokens": 100 * calls, "completion_tokens": 10 * calls, "cost": 0.5 * calls}
    return {
        "kind": "rlm_query", "depth": 1, "model": "large", "prompt": prompt, "seconds": 3.0, **counts,
        "trajectory": turns, **more,
    }  # fmt: skip


def build_meta(index: int, *tree: dict[str, Any], **variables: Any) -> Meta:
    return Meta(index=index, variables=variables, queries=QuerySummary(asked=len(tree), tree=tree))


def test_an_answers_trajectory_has_turns_usage_and_queries(root: Path, run: Run) -> None:
    below = build_query("What of this part?", [build_turn("SUBMIT(answer='a')", "FINAL: a")], 1, depth=2, turn=2)
    asking = build_turn("print(rlm_query(part), llm_query('one?'))", "a b")
    first = build_turn("1 / 0", "ZeroDivisionError", failed=True)
    record = build_query(QUESTION[:200], [first, asking], 3, queries=[below, {**FLAT, **USED, "turn": 2}])
    write_run(root / "run", [Result({"answer": "it is a"}, build_meta(0, record, query=QUESTION))])
    assert run("report", "quick-fox", "--atif", root / "out").returncode == 0
    (path,) = (root / "out").iterdir()
    trajectory = json.loads(path.read_text("utf-8"))
    assert (path.name, trajectory["schema_version"]) == ("trajectory-0.json", "ATIF-v1.7")
    assert (trajectory["session_id"], trajectory["agent"]["name"]) == ("id-of-run", "rlm-batch")
    assert (trajectory["agent"]["model_name"], "notes" in trajectory) == ("large", False)
    user, failed, asked, last = trajectory["steps"]
    assert [step["step_id"] for step in trajectory["steps"]] == [1, 2, 3, 4]
    # The message is complete, although the query's record has only its beginning.
    assert (user["source"], user["message"]) == ("user", QUESTION)
    assert failed["reasoning_content"] == "I do 1 / 0."
    assert failed["tool_calls"][0]["arguments"] == {"code": "1 / 0"}
    assert failed["observation"]["results"][0]["extra"] == {"failed": True}
    (result,) = asked["observation"]["results"]
    assert result["source_call_id"] == asked["tool_calls"][0]["tool_call_id"]
    assert (result["content"], result["extra"]["llm_queries"]) == (
        "a b", [{key: value for key, value in {**FLAT, **USED}.items() if key not in ("kind", "depth")}]
    )  # fmt: skip
    (subagent,) = trajectory["subagent_trajectories"]
    assert result["subagent_trajectory_ref"] == [{"trajectory_id": subagent["trajectory_id"]}]
    assert subagent["steps"][0]["message"] == "What of this part?"
    metrics = {"prompt_tokens": 100, "completion_tokens": 10, "cost_usd": 0.5}
    assert [step["metrics"] for step in (failed, asked, last)] == [metrics] * 3
    assert (last["source"], last["message"]) == ("agent", "it is a")  # the model was asked once again at the end
    assert trajectory["final_metrics"]["total_prompt_tokens"] == 300
    assert trajectory["final_metrics"]["total_cost_usd"] == 2.5  # includes the subagent's and the flat query's cost


def test_unusual_answers_still_become_a_trajectory(root: Path, run: Run) -> None:
    """Missing answers, turns without usage, unknown costs, invalid Unicode, and many queries of one code."""
    bare = {"reasoning": "\ud800", "code": "print(1)", "output": "x" * 10_000 + "\udfff\x00"}
    unknown = build_query("y" * 200, [bare], 2, queries=[{**FLAT, **USED, "turn": 1}], cost=None)
    ended = build_query("z", [], 1, error="BudgetExceeded: all used up")
    write_run(
        root / "run",
        [
            Failure(CodeError("no"), build_meta(0, ended, {**FLAT, **USED})),
            Result({}, build_meta(1, unknown, ended)),
            Result({"x": 1}, build_meta(2)),
        ],
    )
    (root / "out").mkdir()
    assert run("report", "quick-fox", "--atif", root / "out").returncode == 0
    trajectories = {path.name: json.loads(path.read_text("utf-8")) for path in (root / "out").iterdir()}
    assert sorted(trajectories) == ["trajectory-0.json", "trajectory-1-1.json", "trajectory-1-2.json"]
    assert [step["source"] for step in trajectories["trajectory-0.json"]["steps"]] == ["user", "system"]
    assert "all used up" in trajectories["trajectory-0.json"]["steps"][1]["message"]
    odd = trajectories["trajectory-1-1.json"]
    assert "cut after 200 characters" in odd["notes"]
    assert len(odd["steps"][1]["observation"]["results"][0]["extra"]["llm_queries"]) == 1
    assert "metrics" not in odd["steps"][1]
    assert "total_cost_usd" not in odd["final_metrics"]


def test_an_impossible_export_is_refused_with_one_sentence(root: Path, run: Run, refused: Callable[..., str]) -> None:
    write_run(root / "run", [Result({"x": 1}, build_meta(0))])
    (root / "file").touch()
    for directory, text in (
        ("", "--atif is empty"),
        ("s3://bucket/out", "--atif writes only to this machine"),
        (root / "file", "is not a directory: name a new directory"),
        (root / "run", "is not empty: name a new directory"),
        (root / "file" / "out", f"{root}/file is not a directory: name"),
    ):
        assert text in refused("report", "quick-fox", "--atif", directory)
    assert "--messages is empty" in refused("report", "quick-fox", "--messages", "")
    done = run("report", "quick-fox", "--messages", root / "messages.jsonl")
    assert done.returncode == 2
    assert "has no conversations: only runs with record='full' (--record full)" in done.stderr
    assert not (root / "messages.jsonl").exists()
    done = run("report", "quick-fox", "--atif", root / "out")
    assert done.returncode == 2
    assert "has no trajectories: only runs that use rlm or rlm_query have them" in done.stderr
    assert not (root / "out").exists()
