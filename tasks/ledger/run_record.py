"""Records of the flow runs that wrote to a ledger: `run-<id>.json` beside the results, one for each start.

`rlm-batch report` finds runs and their objectives in these records, without a server.
"""

import json
import math
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter

from ...blocks.storage.location import LocalMirror, Location, PathOrLocation, write_file
from ...blocks.storage.location_parsing import parse_location
from ...sandbox.errors import ConfigurationError
from ..repeats import Repeats
from .ledger import claim_idle_ledger, list_files
from .ledger_line import VERSION, check_version
from .result_index import get_results_root

Direction = Literal["minimize", "maximize"]
Aggregate = Literal["mean", "median", "min", "max"]
# In version 1, the keys of results did not depend on `environment`. Up to version 2, those of recursive queries
# depended on their limits.
KEY_VERSION = 3
PATTERN = "run-*.json"
MAX_RECORD_BYTES = 16 * 1024 * 1024  # rlm-batch writes no larger record
MAX_TIME = 1e11  # epoch seconds; `time.gmtime` refuses much larger times
MAX_LISTED = 5  # runs that an error lists
Time = Annotated[float, Field(ge=0, lt=MAX_TIME)]


@dataclass(frozen=True, slots=True)
class Objective:
    """A submitted field by which trials are compared, and whether its least or its greatest value is the best."""

    name: str
    direction: Direction = "minimize"


@dataclass(frozen=True, slots=True)
class ReportSpec:
    """The settings of a flow run's reports."""

    noun: str = "execution"  # the flow's word for an execution
    objectives: tuple[Objective, ...] = ()
    space: Any = None  # the searched space as JSON
    repeats: Repeats | None = None  # With repeats, each group of executions counts as one.
    aggregate: Aggregate = "mean"  # combines the objectives of a group
    constraints: tuple[str, ...] = ()  # the fields that are at most 0 in a feasible trial
    by: tuple[str, ...] = ()  # Executions with the same values of these variables count as one, instead of `repeats`.

    @property
    def objective(self) -> str | None:
        """The name of the only objective; None without one or with several."""
        return self.objectives[0].name if len(self.objectives) == 1 else None

    @property
    def direction(self) -> Direction:
        """The direction of the first objective."""
        return self.objectives[0].direction if self.objectives else "minimize"

    def with_repeats(self, count: int | None, groups: int, aggregate: Aggregate = "mean") -> Self:
        """Return the spec of a run that repeats each of its groups, or this spec if `count` is None."""
        return self if count is None else replace(self, repeats=Repeats(count, groups), aggregate=aggregate)

    def group_by(self, names: str | Sequence[str] | None) -> Self:
        """Return the spec of a report with a row for each combination of these variables' values."""
        by = (names,) if isinstance(names, str) else tuple(names or ())
        return replace(self, by=by, repeats=None) if by else self

    def build_record_fields(self) -> dict[str, Any]:
        """Return the spec as fields of a `RunRecord`. `RunRecord.report_spec` reads them."""
        return {
            "what": self.noun,
            "objective": self.objective,
            "direction": self.direction,
            "objectives": [asdict(item) for item in self.objectives] if len(self.objectives) > 1 else [],
            "space": self.space,
            "constraints": list(self.constraints),
            "repeats": None if self.repeats is None else self.repeats.count,
            "groups": None if self.repeats is None else self.repeats.groups,
            "aggregate": self.aggregate,
        }

    def is_feasible(self, fields: Mapping[str, Any]) -> bool:
        """Return whether the field of each constraint is at most 0. False counts as 0."""
        values = [fields.get(name) for name in self.constraints]
        return all(isinstance(value, (int, float)) and value <= 0 for value in values)


@dataclass(slots=True)
class Origin:
    """The code, options, versions and command that made a run. `[...]` replaces the values of secrets."""

    parameters: dict[str, Any]  # as the Prefect server has them
    sandbox: dict[str, Any]  # the settings of sandboxes and models that are in the keys of results
    facts: dict[str, str]  # the command, versions, the git commit and digests
    code: dict[str, str] = field(default_factory=dict[str, str])  # the texts of parameters with code
    hides_parameters: bool = False  # True if `[...]` replaces a part of the parameters


@dataclass(slots=True)
class RunRecord:
    """One start of a flow run. Times are in epoch seconds.

    `ended` is None while the run lasts, and if it was killed. `succeeded`, `failed`, `best` and `best_index` are None
    until the end.
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
    search: dict[str, Any] = field(default_factory=dict[str, Any])  # the settings of a search
    judged_run: str = ""  # the ledger of the run whose outcomes a check has judged again
    stopped: str = ""  # the reason if a search ended before its last trial
    provider: str = ""
    total: int = 0
    repeats: int | None = None
    groups: int | None = None  # inputs, points or chunks, each of which runs `repeats` times
    aggregate: Aggregate = "mean"
    began: Time = 0.0
    ended: Time | None = None
    succeeded: int | None = None
    failed: int | None = None
    best: float | None = None  # the best score
    best_index: int | None = None  # the index of the trial with the best score
    front: int = 0  # trials on the Pareto front
    sandboxes: int = 0
    sandbox_seconds: Time = 0.0  # the sum of the times that the sandboxes were open
    tags: list[str] = field(default_factory=list[str])
    origin: Origin | None = None  # None in records of earlier versions
    key_version: int = 1  # the version of the keys of results; see `KEY_VERSION`
    version: int = VERSION
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @property
    def report_spec(self) -> ReportSpec:
        """The settings of the run's reports."""
        objectives = tuple(Objective(item["name"], item["direction"]) for item in self.objectives)
        if self.objective is not None:
            objectives = (Objective(self.objective, self.direction),)
        spec = ReportSpec(self.what, objectives, self.space, constraints=tuple(self.constraints))
        return spec.with_repeats(self.repeats, self.groups or 0, self.aggregate)

    def write(self) -> None:
        """Write the record to the ledger atomically, and a copy to the results root if the ledger is elsewhere.

        Ignore errors, because writing results raises them too.
        """
        data = json.dumps(asdict(self), ensure_ascii=True).encode("ascii")
        with suppress(OSError, ConfigurationError):
            write_file(parse_location(self.results_path) / f"run-{self.id}.json", data)
        with suppress(OSError, ConfigurationError):
            root = get_results_root()
            if Path(self.results_path).parent != root:
                write_file(root / f"run-{self.id}.json", data)

    def get_status(self) -> Literal["ended", "running", "killed"] | None:
        """Return whether the run has ended, is running, or was killed. Return None if this machine cannot know."""
        if self.ended is not None:
            return "ended"
        path = parse_location(self.results_path)
        if isinstance(path, Location):
            return None
        with suppress(OSError), claim_idle_ledger(path) as is_idle:
            return "killed" if is_idle else "running"
        return None  # The file system has no locks.

    def finish(self) -> None:
        """Write the record again, with the time of the end."""
        self.ended = time.time()
        self.write()


RECORD: TypeAdapter[RunRecord] = TypeAdapter(RunRecord)


def list_run_records(ledger: PathOrLocation) -> list[RunRecord]:
    """Return the starts of flow runs that wrote to this ledger, the latest last.

    Raises OSError if a location cannot be read, and ConfigurationError for a record of a newer version of rlm-batch.
    """
    if isinstance(ledger, Location):
        mirror = LocalMirror(ledger)  # The copies are deleted with this object.
        paths = mirror.refresh(PATTERN)
    else:
        paths = list(ledger.glob(PATTERN))
    records: list[RunRecord] = []
    for path in paths:
        record = _read_record(path)
        if record is not None:
            record.results_path = str(ledger)
            records.append(record)
    return sorted(records, key=lambda record: record.began)


@dataclass(frozen=True, slots=True)
class KnownRuns:
    """The runs of this machine: the records of the ledgers below the results root, and of ledgers elsewhere."""

    root: Path
    records: list[RunRecord]  # every start, the latest first

    def list_latest(self) -> list[RunRecord]:
        """Return the latest start on each ledger, the latest first."""
        latest: dict[str, RunRecord] = {}
        for record in self.records:
            latest.setdefault(record.results_path, record)
        return list(latest.values())

    def find(self, text: str) -> RunRecord:
        """Return the latest start of the run that has this id or name, or whose id, name or path begins with the text.

        Raises ConfigurationError if there is no such run, or if the text is the beginning for several runs.
        """
        path = os.path.abspath(os.path.expanduser(text)) if os.sep in text else None
        matching: dict[str, RunRecord] = {}  # the latest start by the path of the ledger
        for record in self.records if text.strip() else ():
            names = (record.flow_run_id, record.name, Path(record.results_path).name)
            if text in names:
                return record
            has_name = any(name.startswith(text) for name in names)
            has_path = path is not None and record.results_path.startswith(path)
            if has_name or has_path:
                matching.setdefault(record.results_path, record)
        records = list(matching.values())
        if not records:
            raise ConfigurationError(
                f"there is no run {text!r} in {self.root}: give a run's id or name, or the path of its results; "
                "rlm-batch runs lists them"
            )
        if len(records) > 1:
            examples = [f"{record.name} ({record.results_path})" for record in records[:MAX_LISTED]]
            raise ConfigurationError(
                f"{text!r} begins the names of {len(records)} runs, such as {', '.join(examples)}. Give more of the "
                "name"
            )
        return records[0]


def read_known_runs(root: Path) -> KnownRuns:
    """Return the runs of the ledgers below the results root, and of ledgers elsewhere that still exist.

    Records of newer versions of rlm-batch are left out.
    """
    records: dict[str, RunRecord] = {}
    for path in list_files(root, PATTERN):
        with suppress(ConfigurationError):
            record = _read_record(path)
            if record is not None:
                record.results_path = str(path.parent)  # The ledger may have been moved.
                records.setdefault(record.id, record)
    for path in root.glob(PATTERN):
        with suppress(ConfigurationError):
            record = _read_record(path)
            if record is not None and _has_ledger(record):
                records.setdefault(record.id, record)
    return KnownRuns(root, sorted(records.values(), key=lambda record: record.began, reverse=True))


def _has_ledger(record: RunRecord) -> bool:
    """Return whether the ledger of a record exists. A remote one counts as existing, because asking takes long.

    Raises ConfigurationError if its location cannot be used.
    """
    ledger = parse_location(record.results_path)
    return isinstance(ledger, Location) or (ledger / f"run-{record.id}.json").exists()


def _read_record(path: Path) -> RunRecord | None:
    """Return the record in a file; None if it is damaged or no record.

    Raises ConfigurationError if a newer version of rlm-batch wrote it.
    """
    with suppress(OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        if not path.is_file() or path.stat().st_size > MAX_RECORD_BYTES:
            return None
        text = path.read_text(encoding="utf-8")
        check_version(json.loads(text), path)
        record = RECORD.validate_json(text, strict=True)
        if record.best is not None and not math.isfinite(record.best):
            record.best = None
        if record.flow == "rlm-chunks" and record.what == "execution":  # An earlier version counted the reduction.
            record.what, record.total = "chunk", record.total - 1
        _ = record.report_spec  # This raises an error if the objectives are damaged.
        return record
    return None
