"""Lines of a search stand among the outcomes of a ledger, and are read in the order in which they were written."""

import json
import math
from pathlib import Path

from rlm_batch import Result
from rlm_batch.sandbox.meta import Meta
from rlm_batch.tasks.ledger.ledger import Ledger
from rlm_batch.tasks.ledger.ledger_line import (
    AskedTrial,
    LedgerLine,
    TrialReport,
    encode_asked_trial,
    encode_trial_report,
)


def write_trial(ledger: Ledger, number: int) -> None:
    key = f"key {number}"
    ledger.write_line(encode_asked_trial(AskedTrial(key, number, {"x": number / 2, "opt": "é"}, 0, "search")))
    for step, value in enumerate((0.5, math.nan, -math.inf)):
        ledger.write_line(encode_trial_report(TrialReport(key, number, step, value, is_pruned=step == 2)))
    ledger.write_outcome(key, Result({"loss": 1}, Meta(number, reports=((0, 0.5), (1, math.nan)), pruned=True)))


def test_what_was_written_is_read_in_its_order_over_the_parts_of_several_writers(tmp_path: Path) -> None:
    for number in range(4):
        ledger = Ledger(tmp_path)  # whose name is none of order
        write_trial(ledger, number)
        ledger.close()
    lines = list(Ledger(tmp_path).read_trial_lines())
    kinds = [type(line) for line in lines]
    assert kinds == 4 * [AskedTrial, TrialReport, TrialReport, TrialReport, LedgerLine]
    assert [line.index for line in lines if isinstance(line, AskedTrial)] == [0, 1, 2, 3]
    asked, first, second, third, _ = lines[:5]
    assert isinstance(asked, AskedTrial)
    assert (asked.variables, asked.alternative, asked.search) == ({"x": 0.0, "opt": "é"}, 0, "search")
    values = [line.value for line in (first, second, third) if isinstance(line, TrialReport)]
    assert (values[0], math.isnan(values[1]), values[2]) == (0.5, True, -math.inf)
    assert [line.is_pruned for line in (first, second, third) if isinstance(line, TrialReport)] == [False, False, True]


def test_whoever_reads_outcomes_passes_over_them_and_they_are_strict_json(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    write_trial(ledger, 0)
    (line,) = ledger.read_lines()
    outcome = line.to_outcome()
    assert outcome.meta.pruned
    assert [step for step, _ in outcome.meta.reports] == [0, 1]
    assert math.isnan(outcome.meta.reports[1][1])
    (part,) = tmp_path.glob("part-*.jsonl")
    for text in part.read_text().splitlines():
        json.loads(text, parse_constant=lambda name: (_ for _ in ()).throw(AssertionError(name)))


def test_torn_and_damaged_lines_are_skipped(tmp_path: Path) -> None:
    good = encode_asked_trial(AskedTrial("key", 3, {"x": 1}, 0, "search"))
    asked = json.loads(good)
    report = json.loads(encode_trial_report(TrialReport("key", 3, 1, 0.5, is_pruned=False)))
    damaged = [
        *({**asked, name: value} for name, value in (("index", "3"), ("index", -1), ("variables", []), ("at", "now"))),
        *({**report, name: value} for name, value in (("step", -1), ("step", True), ("value", "high"), ("key", 1))),
        {name: value for name, value in asked.items() if name != "search"},
        [],
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in damaged)
    (tmp_path / "part-a-1.jsonl").write_bytes(b"\xff\n" + data + good + good[:-20])
    (line,) = Ledger(tmp_path).read_trial_lines()
    assert isinstance(line, AskedTrial)
