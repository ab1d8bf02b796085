"""A row for each input: `by` in DataFrames and `rlm-batch report --by`, and the verdicts on samples."""

import csv
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest

from rlm_batch import ConfigurationError, Result, TrialsReport, load_report
from rlm_batch.sandbox.meta import Meta, QuerySummary
from rlm_batch.sandbox.result import Outcome
from rlm_batch.tasks.ledger.run_record import Objective, ReportSpec

from ..flows.reporting.test_pass_at_k import samples
from .conftest import Run, write_run

# Each text is an input; for the characters see `samples`.
VERDICTS = ("+++--", "-!-0-", "++?++", "!!!!!", "?????", "+++++++++++")


def make_report(outcomes: list[Outcome], **options: Any) -> TrialsReport:
    return TrialsReport(outcomes, "/results", ReportSpec(**options))


def make_evaluation() -> list[Outcome]:
    """Return the samples of `VERDICTS`, each with a solution that differs, and a use of the model."""
    outcomes = samples(*VERDICTS)
    for outcome in outcomes:
        outcome.meta.variables["solution"] = f"solution {outcome.meta.index}"
    return outcomes


def test_an_input_has_the_number_of_passed_samples_and_pass_at_k_by_its_definition() -> None:
    frame = make_report(make_evaluation()).to_dataframe(by="task")
    assert list(frame["task"]) == [*range(len(VERDICTS))]
    assert "solution" not in frame
    for verdicts, row in zip(VERDICTS, frame.to_dict("records"), strict=True):
        finished = verdicts.replace("?", "")
        if not finished:
            assert (row["status"], row["error"]) == ("unfinished", "SandboxLost")
            continue
        assert (row["status"], row["passed.count"]) == ("succeeded", len(finished))
        assert (row["passed.sum"], row["passed"]) == (finished.count("+"), finished.count("+") / len(finished))
        for k in (1, 2, 5, 10, 20):
            choices = [*itertools.combinations(finished, k)]
            if choices:
                assert row[f"pass@{k}"] == pytest.approx(sum("+" in choice for choice in choices) / len(choices))
            else:
                assert pandas.isna(row.get(f"pass@{k}"))
    report = make_report(make_evaluation())
    assert frame["pass@1"].mean() == pytest.approx(report.pass_at_k(1, by="task").value)


def test_rows_are_named_by_several_variables_and_have_the_statistics_of_other_fields() -> None:
    outcomes: list[Outcome] = []
    for x, size, seed in itertools.product((1, 2), ("s", "l"), range(3)):
        queries = QuerySummary(asked=1, calls=1, prompt_tokens=10, completion_tokens=seed, cost=0.5)
        meta = Meta(len(outcomes), {"x": x, "size": size, "seed": seed}, seconds=seed, queries=queries)
        outcomes.append(Result({"loss": x + seed, "text": f"{seed}"}, meta))
    frame = make_report(outcomes).to_dataframe(by=["size", "x"])
    assert frame[["size", "x", "loss", "loss.std", "seconds"]].values.tolist() == [
        ["s", 1, 2.0, 1.0, 1.0],
        ["l", 1, 2.0, 1.0, 1.0],
        ["s", 2, 3.0, 1.0, 1.0],
        ["l", 2, 3.0, 1.0, 1.0],
    ]
    assert list(frame["text"]) == [["0", "1", "2"]] * 4
    assert frame[["model_calls", "model_tokens", "model_cost"]].values.tolist() == [[3, 33, 1.5]] * 4
    assert not {"seed", "passed.sum", "pass@1"} & {*frame}
    median = make_report(outcomes, aggregate="max").to_dataframe(by="x")
    assert list(median["loss"]) == [3.0, 4.0]
    with pytest.raises(ConfigurationError, match="execution 0 has no variable 'lr': it has x, size, seed"):
        make_report(outcomes).to_dataframe(by="lr")


def test_whole_numbers_name_the_same_input_as_integers_and_floats() -> None:
    outcomes: list[Outcome] = [Result({"y": x}, Meta(index, {"x": x})) for index, x in enumerate((1, 1.0, True, 1e400))]
    frame = make_report(outcomes).to_dataframe(by="x")
    assert frame[["x", "y.count"]].values.tolist() == [[1, 2], [True, 1], [math.inf, 1]]


def test_the_last_report_of_a_pruned_trial_does_not_count() -> None:
    trials: list[Outcome] = [
        Result({"loss": loss}, Meta(index, {"lr": lr}, pruned=is_pruned))
        for index, (lr, loss, is_pruned) in enumerate([(1, 2.0, False), (1, 9.0, True), (2, 7.0, True)])
    ]
    frame = make_report(trials, objectives=(Objective("loss"),)).to_dataframe(by="lr")
    assert frame["pruned"].tolist() == [False, True]
    assert frame["loss"].tolist() == pytest.approx([2.0, math.nan], nan_ok=True)


def test_numbers_of_passed_tests_are_no_verdicts() -> None:
    outcomes: list[Outcome] = [Result({"passed": count}, Meta(count, {"task": 0})) for count in range(4)]
    (row,) = make_report(outcomes).to_dataframe(by="task").to_dict("records")
    assert (row["passed"], row["passed.count"]) == (1.5, 4)
    assert not {"passed.sum", "pass@1"} & {*row}


def test_repeats_of_an_evaluation_show_how_many_passed(root: Path, run: Run) -> None:
    outcomes: list[Outcome] = []
    for group, outcome in enumerate(samples("+", "+", "!", "-", "+", "+")):
        meta = Meta(group, {"task": group // 3}, group=group // 3, repeat=group % 3, seconds=2.0)
        outcomes.append(
            Result(outcome.outputs, meta) if isinstance(outcome, Result) else type(outcome)(outcome.error, meta)
        )
    write_run(root / "first", outcomes, repeats=3, groups=2)
    header, *rows = [line.split() for line in run("report", "quick-fox").stdout.splitlines()[:3]]
    assert header == ["task", "passed", "pass@1", "pass@2", "seconds"]
    two_of_three = ["2", "of", "3", "0.666667", "1", "2"]
    assert rows == [["0", "0", *two_of_three], ["1", "1", *two_of_three]]
    assert [group.passed for group in load_report(str(root / "first")).groups] == pytest.approx([2 / 3, 2 / 3])


def test_the_report_has_a_row_for_each_input(root: Path, run: Run, refused: Callable[..., str], tmp_path: Path) -> None:
    write_run(root / "first", make_evaluation())
    page, table, parquet = (tmp_path / name for name in ("page.html", "table.csv", "table.parquet"))
    files = ("--html", page, "--csv", table, "--parquet", parquet)
    done = run("report", "quick-fox", "--by", "task", *files)
    assert done.returncode == 0, done.stderr
    header, first, *_ = [line.split() for line in done.stdout.splitlines()]
    columns = ["task", "passed", "pass@1", "pass@2", "pass@5", "pass@10", "seconds"]
    assert header == columns
    assert first == ["0", "0", "3", "of", "5", "0.6", "0.9", "1", "0"]
    assert "Rows: Each row is the mean of the executions with the same task." in done.stderr
    assert "<h2>Executions by task</h2>" in page.read_text()
    assert "<th>pass@2</th>" in page.read_text()
    assert "<td>3 of 5</td><td>0.6</td><td>0.9</td>" in page.read_text()
    with table.open(newline="", encoding="utf-8-sig") as file:
        lines = [*csv.DictReader(file)]
    assert [line["passed.sum"] for line in lines] == ["3", "0", "4", "0", "", "11"]
    frame = load_report(str(root / "first")).to_dataframe(by=["task"])
    stored = pandas.read_parquet(parquet)
    assert list(stored) == list(frame) == list(lines[0])
    assert stored["pass@2"].tolist() == pytest.approx(frame["pass@2"].tolist(), nan_ok=True)
    shown = run("report", "quick-fox", "--by", "task", "--json")
    objects = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [item["meta"]["variables"] for item in objects] == [{"task": number} for number in range(6)]
    assert [item.get("outputs", {}).get("passed.sum") for item in objects] == [3, 0, 4, 0, None, 11]
    sentence = "rlm-batch: execution 0 has no variable 'question': it has task, repeat, solution\n"
    assert refused("report", "quick-fox", "--by", "question", "--html", tmp_path / "none.html") == sentence
    assert not (tmp_path / "none.html").exists()


def test_the_best_input_has_the_best_mean(root: Path, run: Run) -> None:
    losses = {0.1: (3.0, 9.0), 0.2: (5.0, 5.0)}
    trials: list[Outcome] = []
    for lr, values in losses.items():
        for seed, loss in enumerate(values):
            trials.append(Result({"loss": loss}, Meta(len(trials), {"lr": lr, "seed": seed})))
    write_run(root / "first", trials, flow="sweep", what="trial", objective="loss")
    done = run("report", "quick-fox", "--by", "lr")
    assert "Best loss: 5 in trial 1 with lr=0.2" in done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:3]]
    assert [row[1] for row in rows] == ["0.2", "0.1"]
    assert [row[-1] == "best" for row in rows] == [True, False]
    shown = [json.loads(line) for line in run("report", "quick-fox", "--by", "lr", "--json").stdout.splitlines()]
    assert [line.get("best") for line in shown] == [None, True]
    objectives = (Objective("loss"),)
    assert make_report(trials, objectives=objectives).to_dataframe(by="lr")["loss"].tolist() == [6.0, 5.0]
