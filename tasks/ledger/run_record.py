"""Records of the flow runs that wrote to a ledger: `run-<id>.json` beside the results, one for each start.

`rlm-batch report` finds runs and their objectives in these records, without a server.
"""

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from ...blocks.storage.location import Location, PathOrLocation, write_file
from ...blocks.storage.location_parsing import parse_location
from ...blocks.storage.mirror import LocalMirror
from ...sandbox.errors import ConfigurationError
from ..repeats import Repeats
from .ledger_line import VERSION, check_version

Direction = Literal["minimize", "maximize"]
Aggregate = Literal["mean", "median", "min", "max"]


@dataclass(frozen=True, slots=True)
class Objective:
    """A submitted field for the comparison of trials, and whether the least or the greatest value is the best."""

    name: str
    direction: Direction = "minimize"


@dataclass(frozen=True, slots=True)
class ReportSpec:
    """A flow's word for an execution, and its objectives.

    A single objective is in `objective`. Several are in `objectives`, and `objective` is None. `space` is the JSON of
    the searched space. With `repeats`, each group of executions counts as one, by the `aggregate` of its objectives.
    `constraints` are the fields that are at most 0 in a feasible trial.
    """

    noun: str = "execution"
    objective: str | None = None
    direction: Direction = "minimize"
    objectives: tuple[Objective, ...] = ()
    space: Any = None
    repeats: Repeats | None = None
    aggregate: Aggregate = "mean"
    constraints: tuple[str, ...] = ()

    @classmethod
    def for_trials(cls, objectives: Sequence[Objective], space: Any = None, constraints: tuple[str, ...] = ()) -> Self:
        """Return the spec of a sweep with these objectives and constraints."""
        if len(objectives) == 1:
            (only,) = objectives
            return cls("trial", only.name, only.direction, space=space, constraints=constraints)
        return cls("trial", objectives=tuple(objectives), space=space, constraints=constraints)

    def with_repeats(self, count: int | None, groups: int, aggregate: Aggregate = "mean") -> Self:
        """Return the spec of a run that repeats each of its groups, or this spec if `count` is None."""
        return self if count is None else replace(self, repeats=Repeats(count, groups), aggregate=aggregate)

    def is_feasible(self, fields: Mapping[str, Any]) -> bool:
        """Return whether each constraint is a number of at most 0 in a trial's fields."""
        values = [fields.get(name) for name in self.constraints]
        return all(isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0 for value in values)


@dataclass(slots=True)
class RunRecord:
    """One start of a flow run. Times are in epoch seconds. `ended` is None while it runs, or if it was killed.

    `sandbox_seconds` is the sum of the times that its sandboxes were open. `column_types` has the types of the columns
    of a CSV inputs file, or "json" if each cell was parsed separately.
    """

    flow: str
    results_path: str
    flow_run_id: str = ""
    name: str = ""
    what: str = "execution"
    objective: str | None = None
    direction: Direction = "minimize"
    objectives: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # several objectives
    space: Any = None  # the searched space
    constraints: list[str] = field(default_factory=list[str])
    search: dict[str, Any] = field(default_factory=dict[str, Any])  # settings, as in `flows/search/settings.py`
    stopped: str = ""  # the reason if a search ended before its last trial
    provider: str = ""
    total: int = 0
    repeats: int | None = None
    groups: int | None = None  # inputs, points or chunks, each of which runs `repeats` times
    aggregate: Aggregate = "mean"
    began: float = 0.0
    ended: float | None = None
    sandboxes: int = 0
    sandbox_seconds: float = 0.0
    column_types: dict[str, str] | str = field(default_factory=dict[str, str])
    version: int = VERSION
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @property
    def report_spec(self) -> ReportSpec:
        """The flow's word for an execution, and its objectives."""
        objectives = tuple(Objective(item["name"], item["direction"]) for item in self.objectives)
        spec = ReportSpec(self.what, self.objective, self.direction, objectives, self.space)
        spec = replace(spec, constraints=tuple(self.constraints))
        return spec.with_repeats(self.repeats, self.groups or 0, self.aggregate)

    def write(self) -> None:
        """Write the record to the ledger atomically. Ignore errors, because writing results raises them too."""
        with suppress(OSError, ConfigurationError):
            data = json.dumps(asdict(self), ensure_ascii=True).encode("ascii")
            write_file(parse_location(self.results_path) / f"run-{self.id}.json", data)

    def finish(self) -> None:
        """Write the record again, with the time of the end."""
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
            record.results_path = str(path.parent.absolute())  # The ledger may have been moved.
            record.began, record.total = float(record.began), int(record.total)
            yield record
