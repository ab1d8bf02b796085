"""Runs as things: `rlm-batch runs`, the names that `report` takes, two runs compared, and `rlm-batch prune`."""

import csv
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import CodeError, Failure, Result, SandboxLost, compare, load_report
from rlm_batch.flows.inputs.spilling import spill_text
from rlm_batch.flows.reporting.comparison import Comparison, Pair, Side
from rlm_batch.sandbox.meta import Meta
from rlm_batch.sandbox.result import Outcome
from rlm_batch.tasks.ledger.ledger import Ledger
from rlm_batch.tasks.ledger.run_record import RunRecord

from .conftest import Run, environment

DAY = 86_400


def make_run(path: Path, name: str, outcomes: list[Outcome], *, began: float = 1.7e9, **record: Any) -> RunRecord:
    """Write the ledger of a run that has ended, and return its record."""
    ledger = Ledger(path)
    ledger.create()
    for number, outcome in enumerate(outcomes):
        ledger.write_outcome(f"{name}{number}", outcome)
    ledger.close()
    record = {"total": len(outcomes), "succeeded": len(outcomes), "failed": 0, **record}
    made = RunRecord("rlm-sweep", str(path), f"id-of-{name}", name, began=began, **record)
    made.finish()
    made.ended = began + 1
    made.write()
    return made


def make_trial(index: int, variables: dict[str, Any], **fields: Any) -> Outcome:
    return Result(fields, Meta(index=index, variables=variables))


def make_old(path: Path, days: float) -> None:
    """Date all files of a folder back."""
    then = time.time() - days * DAY
    for item in (path, *path.rglob("*")):
        os.utime(item, (then, then), follow_symlinks=False)


@pytest.fixture(autouse=True)
def results_root(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let the records in this process go to the root of the commands, and give the test a cache of its own."""
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(root))
    monkeypatch.setenv("RLM_BATCH_CACHE", str(tmp_path / "cache"))
    return root


def test_runs_are_listed_the_latest_first_with_counts_and_the_best(root: Path, run: Run, tmp_path: Path) -> None:
    trials = [make_trial(n, {"x": n}, loss=n) for n in range(3)]
    make_run(root / "id-of-old-owl", "old-owl", trials, objective="loss", best=0.25, best_index=2)
    make_run(tmp_path / "mine", "new-newt", trials, began=1.8e9, succeeded=2, failed=1)
    RunRecord("rlm-batch", str(root / "killed"), "id-of-killed", "late-lynx", total=7, began=1.75e9).write()
    for text in ("", "[]", '{"version": 1}', '{"version": 1, "flow": "a", "results_path": "/", "began": 1e300}'):
        (root / "killed" / f"run-{len(text)}.json").write_text(text)
    os.mkfifo(root / "killed" / "run-pipe.json")
    (root / "notes").mkdir()
    (root / "notes" / "run-9.json").write_text('{"version": 9}')
    done = run("runs")
    assert done.returncode == 0, done.stderr
    assert [line.split("  ")[0] for line in done.stdout.splitlines()] == ["name", "new-newt", "late-lynx", "old-owl"]
    newest, killed, oldest = done.stdout.splitlines()[1:]
    assert newest.split()[1:] == [
        *["rlm-sweep", "2027-01-15", "08:00", "2", "of", "3,", "1", "failed"],
        f"{tmp_path}/mine",
    ]
    assert " killed, of 7 " in killed
    assert oldest.split()[-3:] == ["loss", "0.25", "id-of-ol"]
    assert f"below {root}" in done.stderr
    lines = [json.loads(line) for line in run("runs", "--json").stdout.splitlines()]
    assert [(line["name"], line["status"], line["best"]) for line in lines] == [
        ("new-newt", "ended", None),
        ("late-lynx", "killed", None),
        ("old-owl", "ended", 0.25),
    ]
    with_lock = Ledger(root / "killed")
    assert with_lock.register_writer()
    try:
        assert json.loads(run("runs", "--json").stdout.splitlines()[1])["status"] == "running"
    finally:
        with_lock.unregister_writer()


def test_an_earlier_run_with_the_same_results_is_named(root: Path, run: Run) -> None:
    make_run(root / "job", "old-owl", [make_trial(0, {"x": 1}, y=1)])
    make_run(root / "job", "new-newt", [make_trial(0, {"x": 2}, y=2)], began=1.8e9)
    note = "new-newt has written to the results of old-owl since: these are the results of new-newt\n"
    for words in (["report", "old-owl"], ["report", "id-of-old"], ["report", "old-owl", "--execution", "0"]):
        done = run(*words)
        assert note in done.stderr
        assert "2" in done.stdout
    for name in ("new-newt", root / "job", "job"):
        assert "has written" not in run("report", name).stderr
    listed = run("runs")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["name", "new-newt"]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("running", ", because the run is still running"),
        ("killed", ", because the run was killed"),
        ("ended", ", because the run ended before them"),
    ],
)
def test_the_report_says_why_executions_have_no_result(root: Path, run: Run, state: str, reason: str) -> None:
    ledger = Ledger(root / "job")
    ledger.create()
    ledger.write_outcome("one", make_trial(0, {}))
    record = RunRecord("rlm-batch", str(root / "job"), "id-of-job", "late-lynx", total=3, began=1.7e9)
    if state == "ended":
        record.finish()
    else:
        record.write()
    if state == "running":
        assert ledger.register_writer()
    try:
        assert f"Missing: 2 have no result{reason}\n" in run("report", "late-lynx").stderr
    finally:
        ledger.unregister_writer()


def test_a_run_is_named_by_a_beginning_and_the_last_one_by_nothing(
    root: Path, run: Run, refused: Callable[..., str], tmp_path: Path
) -> None:
    make_run(root / "id-of-quick-fox", "quick-fox", [make_trial(0, {"x": 7}, y=1)], began=3e8)
    make_run(tmp_path / "late", "quick-owl", [make_trial(0, {"x": 8}, y=1)], began=2e8)
    make_run(tmp_path / "later", "quick", [make_trial(0, {"x": 9}, y=1)], began=1e8)
    for text, x in (("quick-f", 7), ("id-of-quick-o", 8), ("quick", 9), ("late", 8), (tmp_path / "lat" / "..", 0)):
        if x:
            done = run("report", text)
            assert done.stdout.splitlines()[1].split()[1] == str(x), text
    done = run("report")
    assert done.stdout.splitlines()[1].split()[1] == "7"
    assert "Run: quick-fox, the last one" in done.stderr
    message = refused("report", "quick-")
    assert message == (
        f"rlm-batch: 'quick-' begins the names of 2 runs, such as quick-fox ({root}/id-of-quick-fox), "
        f"quick-owl ({tmp_path}/late). Give more of the name\n"
    )
    assert "begins the names of 2 runs" in refused("report", tmp_path / "lat")
    assert "rlm-batch runs lists them" in refused("report", "slow")


def test_two_runs_are_joined_by_their_variables(root: Path, run: Run) -> None:
    failed = Failure(CodeError("no"), Meta(index=1, variables={"x": 1}))
    lost = Failure(SandboxLost("gone"), Meta(index=3, variables={"x": 5}))
    first = [make_trial(0, {"x": 0}, loss=1.0, passed=False, text="a"), failed, make_trial(2, {"x": 2}, loss=5), lost]
    second = [
        make_trial(0, {"x": 4}, loss=9),
        make_trial(1, {"x": 1.0}, loss=2),
        make_trial(2, {"x": 0}, loss=0.5, passed=True, text="b"),
        make_trial(3, {"x": 5}, loss=3),
    ]
    make_run(root / "a", "first", first, objective="loss")
    make_run(root / "b", "second", second, objective="loss")
    done = run("report", "first", "second")
    assert done.returncode == 0, done.stderr
    counts = "2 of 4 executions succeeded, 2 failed (1 did not run to the end)"
    assert f"A: first, {counts}; best loss 1 in trial 0 with x=0" in done.stderr
    expected = "3 in both, 1 only in A, 1 only in B, 1 failed only in A, 1 not run to the end in A or B"
    assert expected in done.stderr
    assert "loss: mean 1 to 0.5, difference -0.5; of 1, 1 less in B, 0 more" in done.stderr
    assert "passed: mean 0 to 1, difference 1; of 1, 0 less in B, 1 more" in done.stderr
    header, *rows = done.stdout.splitlines()
    assert " ".join(header.split()) == "A B x loss A loss B loss difference passed A passed B passed difference outcome"
    assert [" ".join(row.split()) for row in rows] == [
        "1 1 1 2 failed in A: CodeError: no",
        "2 2 5 only in A",
        "3 3 5 3 unfinished in A: SandboxLost: gone",
        "0 4 9 only in B",
        "0 2 0 1 0.5 -0.5 0 1 1",
    ]
    lines = [json.loads(line) for line in run("report", "first", "second", "--json").stdout.splitlines()]
    assert [line["variables"]["x"] for line in lines] == [0, 1, 2, 5, 4]
    assert lines[0]["fields"]["loss"] == {"a": 1.0, "b": 0.5, "difference": -0.5}
    assert lines[1]["a"] == {"index": 1, "status": "failed", "error": "CodeError: no"}
    assert lines[3]["a"] == {"index": 3, "status": "unfinished", "error": "SandboxLost: gone"}
    assert lines[4]["a"] is None


def test_a_run_with_repeats_is_compared_by_its_groups(root: Path, run: Run) -> None:
    outcomes: list[Outcome] = [
        Result({"loss": float(group + repeat)}, Meta(2 * group + repeat, {"x": group}, group=group, repeat=repeat))
        for group in range(2)
        for repeat in range(2)
    ]
    make_run(root / "a", "first", outcomes, repeats=2, groups=2)
    make_run(root / "b", "second", [make_trial(0, {"x": 1}, loss=4.0)])
    (pair, only) = (
        json.loads(line) for line in reversed(run("report", "first", "second", "--json").stdout.splitlines())
    )
    assert pair["fields"] == {"loss": {"a": 1.5, "b": 4.0, "difference": 2.5}}
    assert (only["variables"], only["b"]) == ({"x": 0}, None)


def make_samples(prompt: str, verdicts: dict[str, str], **fields: Any) -> list[Outcome]:
    """Return the samples of questions: `+` passed, `-` did not pass, `!` failed."""
    outcomes: list[Outcome] = []
    for question, text in verdicts.items():
        for verdict in text:
            meta = Meta(index=len(outcomes), variables={"question": question, "prompt": prompt})
            result = Result({"passed": verdict == "+", **fields}, meta)
            outcomes.append(Failure(CodeError("no"), meta) if verdict == "!" else result)
    return outcomes


def test_runs_with_different_prompts_are_joined_by_the_question(
    root: Path, run: Run, refused: Callable[..., str], tmp_path: Path
) -> None:
    make_run(root / "a", "first", make_samples("Add.", {"1+1": "++", "2+2": "++-!", "3+3": "--", "=4": "+-"}, A=1))
    make_run(root / "b", "second", make_samples("Think.", {"1+1": "++", "2+2": "-", "3+3": "+-", "=4": "--"}, A=2))
    assert "10 only in A, 7 only in B" in run("report", "first", "second").stderr
    page, table, raw = (tmp_path / name for name in ("page.html", "table.csv", "raw.csv"))
    done = run("report", "first", "second", "--by", "question", "--html", page, "--csv", table)
    assert done.returncode == 0, done.stderr
    # The differences are 0, -0.5, 0.5 and -0.5: their mean is -0.125 and its standard error 0.2394.
    value, half = -0.125, 3.182 * 0.23936
    comparison = compare(str(root / "a"), str(root / "b"), by="question")
    assert comparison.compute_interval("passed") == pytest.approx((value - half, value + half), rel=0.02)
    assert comparison.compute_interval("A") is None, "all differences are equal"
    assert [pair.variables["question"] for pair in comparison.worse] == ["2+2", "=4"]
    lines = done.stderr.splitlines()
    assert "Pairs: 4 in both" in lines
    assert "Worse in B: question=2+2; question==4" in lines
    assert any(line.startswith("passed: mean 0.5 to 0.375, difference -0.125 (95 %: -0.89") for line in lines)
    titles = [
        "A",
        "B",
        "question",
        "passed A",
        "passed B",
        "passed difference",
        "A A",
        "A B",
        "A difference",
        "outcome",
    ]
    assert comparison.list_rows()[0] == titles
    text = page.read_text()
    assert all(f"<th>{title}</th>" in text for title in titles)
    assert text.count("<td>worse</td>") == 2
    assert "question=2+2; question==4" in text
    with table.open(newline="", encoding="utf-8-sig") as file:
        rows = [*csv.DictReader(file)]
    assert [*rows[0]] == titles
    assert {row["question"]: row["passed difference"] for row in rows} == {
        "1+1": "0.0", "2+2": "-0.5", "3+3": "0.5", "'=4": "-0.5",
    }  # fmt: skip
    assert [row["question"] for row in rows if row["outcome"] == "worse"] == ["2+2", "'=4"]
    shown = run("report", "first", "second", "--by", "question", "--json", "--raw-csv", "--csv", raw).stdout
    objects = [json.loads(line) for line in shown.splitlines()]
    assert [(item["variables"]["question"], item["worse"]) for item in objects] == [
        ("1+1", False), ("2+2", True), ("3+3", False), ("=4", True),
    ]  # fmt: skip
    assert "\n=4," not in raw.read_text()
    assert ",=4," in raw.read_text()
    make_run(root / "c", "third", [make_trial(0, {"task": 1}, passed=True)])
    message = f"rlm-batch: {root}/c: execution 0 has no variable 'question': it has task\n"
    assert refused("report", "first", "third", "--by", "question") == message
    for option in ("--usage", "--parquet=x", "--messages=x", "--show-output", "--execution=1"):
        assert "takes only --by, --csv, --html, --json and --raw-csv" in refused("report", "a", "b", option)


@pytest.mark.parametrize(("freedom", "quantile"), [(2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (29, 2.045)])
def test_the_interval_of_a_difference_is_students(freedom: int, quantile: float) -> None:
    values = [float(number % 5) + number / 100 for number in range(freedom + 1)]
    pairs = [
        Pair({"x": number}, (Side(number, {}, "succeeded", {"y": 1.0}, None), Side(number, {}, "", {"y": value}, None)))
        for number, value in enumerate(values)
    ]
    interval = Comparison(pairs, ["y"]).compute_interval("y")
    assert interval is not None
    half = (interval[1] - interval[0]) / 2
    exact = quantile * statistics.stdev(values) / math.sqrt(len(values))
    assert exact <= half * 1.001
    assert half <= exact * 1.05
    assert sum(interval) / 2 == pytest.approx(statistics.mean(values) - 1)
    assert Comparison(pairs[:2], ["y"]).compute_interval("y") is None


def test_a_pair_is_worse_by_the_objective_or_because_it_failed(root: Path) -> None:
    failed = Failure(CodeError("no"), Meta(index=2, variables={"variables": 0, "outcome": 2}))
    first = [make_trial(number, {"variables": 0, "outcome": number}, loss=1.0, passed=True) for number in range(3)]
    second = [
        make_trial(0, {"variables": 0, "outcome": 0}, loss=2.0, passed=True),
        make_trial(1, {"variables": 0, "outcome": 1}, loss=0.5, passed=False),
        failed,
    ]
    for maximize, worse in ((False, [0, 2]), (True, [1, 2])):
        options: dict[str, Any] = {"objective": "loss", "direction": "maximize" if maximize else "minimize"}
        paths = [root / f"{name}-{maximize}" for name in "ab"]
        make_run(paths[0], f"first-{maximize}", first, **options)
        make_run(paths[1], f"second-{maximize}", second, **options)
        comparison = compare(load_report(str(paths[0])), load_report(str(paths[1])))
        assert [pair.variables["outcome"] for pair in comparison.worse] == worse
        header, *rows = comparison.list_rows()
        assert len({*header}) == len(header)
        assert header[:4] == ["A", "B", "variables", "variables.outcome"]
        assert rows[0][-1] == "worse; failed in B: CodeError: no"
        assert str(comparison).splitlines()[0] == "Pairs: 3 in both, 1 failed only in B"
    unknown = [make_trial(0, {"x": 0}, loss=1.0)]
    make_run(root / "c", "third", unknown)
    assert "Worse" not in str(compare("third", "third"))


def test_nan_in_the_second_run_is_worse_and_nan_variables_are_compared(root: Path, run: Run) -> None:
    nan = math.nan
    make_run(
        root / "a", "first", [make_trial(0, {"x": nan}, loss=1.0), make_trial(1, {"x": 1}, loss=nan)], objective="loss"
    )
    make_run(
        root / "b", "second", [make_trial(0, {"x": nan}, loss=nan), make_trial(1, {"x": 1}, loss=nan)], objective="loss"
    )
    done = run("report", "first", "second", "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["variables"]["x"] for line in lines] == [None, 1]
    assert [line["worse"] for line in lines] == [True, False]
    assert lines[0]["fields"] == {"loss": {"a": 1.0, "b": None, "difference": None}}


def test_old_runs_are_deleted_and_others_stay(root: Path, run: Run, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    names = ("old", "young", "running", "with-notes")
    for name in names:
        make_run(root / name, name, [make_trial(0, {"x": 1}, y="long" * 5000)], began=time.time() - 40 * DAY)
    make_run(outside, "outside", [], began=time.time() - 40 * DAY)
    (root / "old" / "files").mkdir()
    (root / "old" / "files" / "link").symlink_to(outside)
    (root / "with-notes" / "notes.txt").write_text("mine")
    (root / "link").symlink_to(outside)
    (root / "foreign").mkdir()
    (root / "foreign" / "part-1.jsonl").write_text("mine")
    for path in root.iterdir():
        if path.name != "young" and not path.is_symlink():
            make_old(path, 35)
    running = Ledger(root / "running")
    assert running.register_writer()
    before = sorted(path.name for path in root.iterdir())
    try:
        dry = run("prune", "--older-than", "30d", "--dry-run")
        assert "would delete 1 run" in dry.stdout
        assert sorted(path.name for path in root.iterdir()) == before
        recent = run("prune", "--older-than", "1m", "--yes", "--json")
    finally:
        running.unregister_writer()
    assert recent.returncode == 0, recent.stderr
    deleted = [json.loads(line) for line in recent.stdout.splitlines()]
    assert [(line["name"], line["deleted"]) for line in deleted] == [("old", True)]
    assert deleted[0]["bytes"] > 20_000
    assert "deleted 1 run and 0 folders of the cache, " in recent.stderr
    assert f"stays: {root}/running, because a run uses it" in recent.stderr
    assert f"stays: {root}/with-notes, because rlm-batch did not write 'notes.txt' in it" in recent.stderr
    assert sorted(path.name for path in root.iterdir()) == [name for name in before if name != "old"]
    assert list(outside.iterdir())


def test_files_of_long_parameters_that_no_run_starts_with_are_deleted(root: Path, run: Run) -> None:
    unused, used = (Path(spill_text(text)) for text in ("unused", "used"))
    make_old(root, 35)
    assert spill_text("used") == str(used)
    run("prune", "--older-than", "30d", "--dry-run")
    assert unused.exists()
    run("prune", "--older-than", "30d", "--yes")
    assert (unused.exists(), used.exists()) == (False, True)


def test_prune_asks_before_it_deletes(root: Path, run: Run, refused: Callable[..., str]) -> None:
    make_run(root / "old", "old", [])
    make_old(root / "old", 35)
    done = run("prune", "--older-than", "4w")
    assert done.returncode == 2
    assert "nothing was deleted: --yes deletes without a question, --dry-run only lists" in done.stderr
    assert "--yes" in refused("prune", "--older-than", "4w", "--json")
    for text in ("30", "d", "-1d", "thirty days"):
        assert "--older-than" in refused("prune", f"--older-than={text}")
    assert (root / "old").exists()
    assert "deleted 1 run and 0 folders of the cache" in run("prune", "--older-than", "4w", "--yes").stdout
    assert not (root / "old").exists()


def test_the_cache_loses_folders_that_no_process_uses(root: Path, run: Run, tmp_path: Path) -> None:
    packages = tmp_path / "cache" / "packages"
    used, idle, foreign = (packages / name for name in ("a" * 24, "b" * 24, "notes"))
    for folder in (used, idle, foreign):
        folder.mkdir(parents=True)
        (folder / "module.py").write_text("x = 1\n" * 2000)
        make_old(folder, 35)
    program = f"""
import asyncio, sys
from pathlib import Path
from rlm_batch.blocks.host_files.cache import make_once
asyncio.run(make_once(Path({str(used)!r}), None))
print("ready", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=-1, stdout=-1, text=True, env=environment(tmp_path)
    ) as user:
        assert user.stdout is not None
        assert user.stdin is not None
        assert user.stdout.readline() == "ready\n"
        assert time.time() - used.stat().st_mtime < DAY  # Its use counts, not its creation.
        make_old(used, 35)
        done = run("prune", "--older-than", "30d", "--yes")
        user.stdin.close()
    assert "deleted 0 runs and 1 folder of the cache" in done.stdout
    assert f"stays: {used}, because a run uses it" in done.stderr
    assert used.exists()
    assert foreign.exists()
    assert not idle.exists()


@pytest.mark.parametrize("words", [["runs"], ["prune", "--older-than", "30d"]])
def test_runs_and_prune_start_without_prefect(words: list[str]) -> None:
    program = f"""
import sys
from rlm_batch.cli.main import main
try:
    main({words})
except SystemExit as end:
    assert not end.code
assert "prefect" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_command_prints_the_name_that_report_takes(server: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("SUBMIT(y=x)")
    (tmp_path / "in.jsonl").write_text('{"x": 1}\n')
    done = run("batch", "code.py", "--inputs", "in.jsonl", "--results-path", "somewhere")
    assert done.returncode == 0, done.stderr
    name = done.stdout.splitlines()[-1].removeprefix("Results of ").partition(": ")[0]
    assert f"{tmp_path}/somewhere" in run("report", name).stdout
    assert run("runs").stdout.splitlines()[1].split()[:2] == [name, "rlm-batch"]
