"""A flow run that is over, or under way, as its ledger tells it: no server is asked, and one line is held at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..sandbox.errors import ConfigurationError
from ..sandbox.result import Failure, Result
from ..tasks.ledger import Ledger, read_line, results_root
from .record import Record, find_record, records_of
from .tally import Tally


@dataclass(frozen=True, slots=True)
class Past:
    """A ledger's runs and outcomes."""

    path: Path
    records: list[Record]  # the latest last; never empty

    def outcomes(self) -> Iterator[Result | Failure]:
        """The outcome that counts of each execution, by their numbers.

        Success beats failure, then the later beats the earlier, for each execution; where the code was changed and run
        again on the same ledger, so that a number stands there with several keys, the latest of them is told.
        """
        parts: dict[str, int] = {}
        held: dict[str, tuple[bool, float, int, int, int, int]] = {}
        for line in Ledger(self.path).lines():
            part, offset, length = line.where
            index = line.data.get("index")
            found = (line.succeeded, line.at, index or 0, parts.setdefault(part, len(parts)), offset, length)
            if line.key not in held or found[:2] >= held[line.key][:2]:
                held[line.key] = found
        latest: dict[int, tuple[bool, float, int, int, int, int]] = {}
        for found in held.values():
            if found[2] not in latest or found[1] >= latest[found[2]][1]:
                latest[found[2]] = found
        del held
        names = list(parts)
        for index in sorted(latest):
            _, _, _, part, offset, length = latest[index]
            line = read_line(names[part], offset, length)
            if line is not None:
                yield line.outcome()

    def tally(self) -> Tally:
        """The counts of its outcomes."""
        tally = Tally(self.records[-1].about)
        for outcome in self.outcomes():
            tally.add(outcome)
        return tally


def past(run: str) -> Past:
    """The run with that id or name, or the ledger at that path. Raises ConfigurationError where there is none."""
    path = Path(run).expanduser()
    if not run.strip() or not path.is_dir():
        record = find_record(results_root(), run) if run.strip() else None
        if record is None:
            raise ConfigurationError(
                f"there is no run {run!r} below {results_root()}: give a flow run's id or name, or the path of its "
                "results, which its log says"
            )
        path = Path(record.results_path)
    path = path.absolute()
    if not any(path.glob("part-*.jsonl")) and not any(path.glob("run-*.json")):
        raise ConfigurationError(f"{path} has no results: it is not a ledger, or nothing was run yet")
    found = records_of(path) or [Record("run", str(path), name=path.name)]
    return Past(path, found)
