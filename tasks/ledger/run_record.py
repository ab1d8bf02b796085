"""What a ledger keeps of each flow run that wrote to it, beside the results: `run-<id>.json`, one for each start.

It is what `rlm-batch report` finds a run by, and knows its objective from, where no server is asked.
"""

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from ...blocks.storage.location import Location, PathOrLocation, write_file
from ...blocks.storage.location_parsing import parse_location
from ...blocks.storage.mirror import LocalMirror
from ...sandbox.errors import ConfigurationError
from .ledger_line import VERSION, check_version

Direction = Literal["minimize", "maximize"]


@dataclass(frozen=True, slots=True)
class Objective:
    """A submitted field that trials are compared by, and whether the least or the greatest is the best."""

    name: str
    direction: Direction = "minimize"


@dataclass(frozen=True, slots=True)
class ReportSpec:
    """What a flow says of its executions: what one is called, and the objective that one is better than another by.

    Where there are several objectives, they are `objectives`, and no one is `objective`. `space` is the JSON of the
    search space, where one was searched.
    """

    noun: str = "execution"
    objective: str | None = None
    direction: Direction = "minimize"
    objectives: tuple[Objective, ...] = ()
    space: Any = None

    @classmethod
    def for_trials(cls, objectives: Sequence[Objective], space: Any = None) -> Self:
        """What a sweep with these objectives says."""
        if len(objectives) > 1:
            return cls("trial", objectives=tuple(objectives), space=space)
        if not objectives:
            return cls("trial", space=space)
        return cls("trial", objectives[0].name, objectives[0].direction, space=space)


@dataclass(slots=True)
class RunRecord:
    """One start of a flow run. Times are in epoch seconds; `ended` is None while it runs, and where it was killed.

    `sandboxes` were opened by it, and were open for `sandbox_seconds` together. `column_types` are the types by which
    the columns of a CSV file of inputs were read, or "json" where each cell was by itself; empty without such a file.
    """

    flow: str
    results_path: str
    flow_run_id: str = ""
    name: str = ""
    what: str = "execution"
    objective: str | None = None
    direction: Direction = "minimize"
    objectives: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # where there are several
    space: Any = None  # that was searched
    provider: str = ""
    total: int = 0
    began: float = 0.0
    ended: float | None = None
    sandboxes: int = 0
    sandbox_seconds: float = 0.0
    column_types: dict[str, str] | str = field(default_factory=dict[str, str])
    version: int = VERSION
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @property
    def report_spec(self) -> ReportSpec:
        """What its flow says of its executions."""
        objectives = tuple(Objective(item["name"], item["direction"]) for item in self.objectives)
        return ReportSpec(self.what, self.objective, self.direction, objectives, self.space)

    def write(self) -> None:
        """Writes it to the ledger, in one piece. Raises nothing where that fails: then writing results fails too."""
        with suppress(OSError, ConfigurationError):
            data = json.dumps(asdict(self), ensure_ascii=True).encode("ascii")
            write_file(parse_location(self.results_path) / f"run-{self.id}.json", data)

    def finish(self) -> None:
        """Writes it again, with the time of its end."""
        self.ended = time.time()
        self.write()


def list_run_records(ledger: PathOrLocation) -> list[RunRecord]:
    """Return the starts of flow runs that wrote to this ledger, the latest last, without damaged and foreign records.

    Raises OSError if a location cannot be read, and ConfigurationError for a record of a newer version of rlm-batch.
    """
    if isinstance(ledger, Location):
        mirror = LocalMirror(ledger)
        records = list(_read_records(mirror.refresh("run-*.json")))
    else:
        records = list(_read_records(ledger.glob("run-*.json")))
    for record in records:
        record.results_path = str(ledger)
    return sorted(records, key=lambda record: record.began)


def find_run_record(root: Path, id_or_name: str) -> RunRecord | None:
    """Return the latest start of the flow run with that id or name, among the ledgers below the root.

    Raises ConfigurationError for a record of a newer version of rlm-batch.
    """
    records = _read_records(root.glob("*/run-*.json"))
    matches = (record for record in records if id_or_name in (record.flow_run_id, record.name))
    return max(matches, key=lambda record: record.began, default=None)


def _read_records(paths: Iterable[Path]) -> Iterator[RunRecord]:
    for path in paths:
        with suppress(OSError, ValueError, TypeError, AttributeError):
            data = json.loads(path.read_text(encoding="utf-8"))
            check_version(data, path)
            record = RunRecord(**data)
            record.results_path = str(path.parent.absolute())  # a ledger may have been moved
            record.began, record.total = float(record.began), int(record.total)
            yield record
