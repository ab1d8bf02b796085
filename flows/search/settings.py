"""The settings of a search in its run's record. A search that continues takes those that its call leaves out."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from ...blocks.storage.location import PathOrLocation
from ...sandbox.caller import name_parameter
from ...sandbox.errors import ConfigurationError
from ...tasks.ledger.run_record import Objective, RunRecord, list_run_records

SAMPLERS = ("random", "tpe")
OWN_SAMPLERS = "optuna.samplers:"  # runs of deployments may import only these, and ledgers may name only these
STOPS = ("stop_at", "stop_after")


@validated(frozen=True)
class SearchSettings:
    """The settings of a search, as in the parameters of a sweep. None is a setting that the call leaves out."""

    sampler: str | None = None
    seed: int | None = None
    pruner: str | None = None
    start: list[dict[str, Any]] | None = None
    stop_at: float | None = None
    stop_after: int | None = None
    constraints: list[str] | None = None

    def to_record(self, code: str) -> dict[str, Any]:
        """Return the settings as JSON for the run's record, with a digest of the code."""
        return {**asdict(self), "code": _compute_digest(code)}

    def complete(self, recorded: "SearchSettings") -> tuple[Self, list[str]]:
        """Add the recorded settings that these leave out. Return the result, and the names of the added settings.

        If either stop is set, both are: another stop replaces the recorded one.
        """
        has_stop = any(getattr(self, name) is not None for name in STOPS)
        added = {
            name: value
            for name, value in asdict(recorded).items()
            if value is not None and getattr(self, name) is None and not (name in STOPS and has_stop)
        }
        return replace(self, **added), list(added)

    def describe(self, names: Sequence[str]) -> str:
        """Return these settings in words, such as "sampler random and stop_at 0.5"."""
        texts = [
            f"{len(self.start or ())} start points" if name == "start" else f"{name} {_format(getattr(self, name))}"
            for name in names
        ]
        return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def continue_settings(
    given: SearchSettings, ledger: PathOrLocation | None, code: str, space: Any, objectives: tuple[Objective, ...]
) -> tuple[SearchSettings, str]:
    """Add the settings of the ledger's last search, if it is the same search, to those that the call gives.

    Args:
        given: The settings of the call.
        ledger: The ledger, which may not exist.
        code: The code of the trials.
        space: The JSON of the space.
        objectives: The objectives.

    Returns:
        The settings, and a sentence about those that the call leaves out, or an empty text.

    Raises:
        ConfigurationError: The ledger cannot be read, or the recorded sampler has to be named again.
    """
    try:
        records = [] if ledger is None else list_run_records(ledger)
    except OSError as error:
        raise ConfigurationError(f"the results in {ledger} cannot be read: {error.strerror or error}") from None
    for record in reversed(records):
        is_same = record.space == space and record.report_spec.objectives == objectives
        if not is_same or record.search.get("code") != _compute_digest(code):
            continue
        settings, added = given.complete(_read_settings(record))
        # Code may be able to write to the ledger, so a sampler's module is imported only if the caller names it.
        sampler = settings.sampler
        if "sampler" in added and sampler not in SAMPLERS and not str(sampler).startswith(OWN_SAMPLERS):
            raise ConfigurationError(
                f"the search in {ledger} has the sampler {sampler}: name it again with {name_parameter('sampler')}, "
                "or name another one"
            )
        if not added:
            return settings, ""
        text = f"the search in {ledger} continues with its {settings.describe(added)}: pass other values to change that"
        return settings, text
    return given, ""


def _read_settings(record: RunRecord) -> SearchSettings:
    """Return a record's settings, or none if they are damaged."""
    values = {name: value for name, value in record.search.items() if name != "code"}
    try:
        return TypeAdapter(SearchSettings).validate_python(values)
    except ValidationError:
        return SearchSettings()


def _compute_digest(code: str) -> str:
    return hashlib.sha256(code.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _format(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
