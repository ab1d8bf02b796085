"""What a ledger holds: counted at the end, for benchmarks/scale.py, and while it grows."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Row:
    """A line of a part's table. `right` is None where nothing was wanted."""

    what: str
    found: str
    wanted: str = ""
    right: bool | None = None
    count: bool = False  # what is wrong if it is not right


class LedgerGrowth:
    """Counts the lines that a ledger has gained, without reading those before again; by shard, and when."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[Path, int] = {}
        self.lines = 0
        self.by_shard: dict[str, int] = defaultdict(int)

    def count_lines(self) -> int:
        """How many there are."""
        for part in self._path.glob("part-*.jsonl"):
            with part.open("rb") as file:
                file.seek(self._offsets.get(part, 0))
                while data := file.read(1 << 20):
                    count = data.count(b"\n")
                    self.lines += count
                    self.by_shard[get_shard(part)] += count
                self._offsets[part] = file.tell()
        return self.lines


def get_shard(part: Path) -> str:
    """What the name of a part begins with: its job and shard."""
    return "-".join(part.name.split("-")[1:3])


def read_ledger_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each whole line of a ledger, with the shard that wrote it."""
    for part in sorted(path.glob("part-*.jsonl")):
        with part.open("rb") as file:
            for raw in file:
                if raw.endswith(b"\n"):
                    yield get_shard(part), json.loads(raw)


@dataclass
class LedgerCounts:
    """What a ledger holds. `twice` are keys with two results; `again` executions that began when they had one."""

    lines: int = 0
    results: int = 0
    twice: int = 0
    again: int = 0
    wrong: int = 0

    @classmethod
    def read(cls, path: Path) -> LedgerCounts:
        """Reads it; the result of each is to be one more than its x."""
        counts = cls()
        # When a line was written, if it is a result, and when its execution began.
        first: dict[bytes, tuple[float, float]] = {}
        several: dict[bytes, list[tuple[float, float]]] = {}
        for _, line in read_ledger_lines(path):
            succeeded = line["status"] == "succeeded"
            counts.lines += 1
            counts.wrong += succeeded and line["outputs"]["y"] != line["meta"]["variables"]["x"] + 1
            key = bytes.fromhex(line["key"])[:12]
            entry = (line["at"] if succeeded else math.inf, line["at"] - line["meta"]["seconds"])
            if first.setdefault(key, entry) is not entry:
                several.setdefault(key, [first[key]]).append(entry)
        counts.results = sum(written < math.inf for written, _ in first.values())
        for key, entries in several.items():
            results = [written for written, _ in entries if written < math.inf]
            counts.results += bool(results) and first[key][0] == math.inf
            counts.twice += len(results) > 1
            counts.again += any(began > min(results, default=math.inf) for _, began in entries)
        return counts

    def build_rows(self, executions: int) -> list[Row]:
        """What is to be right of it."""
        return [
            Row("executions with a result", str(self.results), str(executions), self.results == executions, True),
            Row("executions with two results", str(self.twice), "0", not self.twice, True),
            Row("executions begun although they had one", str(self.again), "0", not self.again, True),
            Row("wrong results", str(self.wrong), "0", not self.wrong, True),
            Row("lines in the ledger", str(self.lines)),
        ]
