"""An execution, and the key with which a later run finds its result."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ..blocks.host_files.source_tree import open_source
from ..sandbox.errors import CodeError, ConfigurationError, RlmBatchError
from ..sandbox.intake.reports import ShouldPrune
from ..sandbox.meta import Meta, QuerySummary
from ..sandbox.queries.budget import Usage
from ..sandbox.queries.recursive_model import RecursionSettings, ends_at_limit
from ..sandbox.requests.execution_request import EncodedVariable
from ..sandbox.result import Failure, Outcome, Result
from ..sandbox.wire.nonfinite import replace_nonfinite, restore_numbers
from .repeats import NO_PLACE, Place, Repeats, locate_execution

LARGE_BYTES = 10 * 2**20  # bytes of JSON; more is slow to send, and often a file would do


@dataclass(frozen=True, slots=True)
class Pruning:
    """The rule that prunes a trial: `should_prune` takes a reported step and value, and returns whether to end it.

    The result of a pruned trial has the last reported value in the field `objective`.
    """

    objective: str
    should_prune: ShouldPrune


OutcomeT = TypeVar("OutcomeT", Result, Failure, Outcome)


@dataclass(slots=True)
class Execution:
    """One piece of code with its variables, and its index in its flow run."""

    index: int
    code: str
    variables: dict[str, Any]
    key: str
    # The ledger has none of the following fields.
    encoded_variables: dict[str, EncodedVariable] = field(default_factory=dict[str, EncodedVariable])
    errors: list[RlmBatchError] = field(default_factory=list[RlmBatchError])  # the errors of failed attempts
    pruning: Pruning | None = None  # None if the execution is never pruned
    unchecked_key: str = ""  # the key without the run's check; empty without a check
    is_done: bool = False  # True once an outcome is recorded
    is_reduction: bool = False  # True if it reads the results of the others, so that no check judges it
    ended: Outcome | None = None  # the outcome of an execution that waits for its check
    ended_earlier: bool = False  # True if `ended` is from an earlier run
    archive: bytes = b""  # the files for the check, as ZIP
    archive_problems: tuple[str, ...] = ()  # a sentence for each file that the archive lacks
    place: Place = NO_PLACE  # the group and the repeat, if each input runs several times
    summarize_queries: Callable[[], QuerySummary] = QuerySummary  # returns the queries of the last attempt so far
    get_usage: Callable[[], Usage] = Usage  # returns the usage of the last attempt so far
    recorded_usage: Usage = field(default_factory=Usage)  # the last usage that was written to the ledger
    inputs_failure: str = ""  # the reason if the kept sandbox lacks the files with the variables
    failed_at: float = 0.0  # the time of an earlier run's failure, unless that was an interruption

    @property
    def attempt(self) -> int:
        """The number of the current or next attempt, from 1."""
        return len(self.errors) + 1

    @property
    def replay_key(self) -> str:
        """The key under which an attempt stores the model's answers, and finds those of earlier attempts.

        After an interruption the key stays, so that nothing is paid twice. After any other failure it is a new one,
        also in a later run (`failed_at`), because the same answers would fail again.
        """
        fresh_starts = sum(not is_interruption(error, error.meta) for error in self.errors)
        return f"{self.key} {self.failed_at} {fresh_starts}"

    @property
    def seed_numbers(self) -> int | tuple[int, ...]:
        """The numbers from which the execution's seed is derived. Resuming with more repeats does not change them."""
        return number_seed(self.index, self.place)

    @property
    def earlier_errors(self) -> tuple[str, ...]:
        """The errors of the failed attempts, a line for each."""
        return tuple(f"{type(error).__name__}: {error.summary}" for error in self.errors)

    def complete_meta(self, meta: Meta, tool_calls: dict[str, int] | None = None) -> Meta:
        """Return the meta of an attempt with the fields that only the flow run knows."""
        return replace(
            meta,
            index=self.index,
            group=self.place.group,
            repeat=self.place.repeat,
            attempt=self.attempt,
            earlier_errors=self.earlier_errors,
            tool_calls=tool_calls or {},
            ended_at=time.time(),
            is_reduction=self.is_reduction,
        )


def is_interruption(error: RlmBatchError, meta: Meta | None, recursion: RecursionSettings | None = None) -> bool:
    """Return whether an execution failed for a reason other than its model's answers: a limit, or a lost connection.

    With the settings of a later run, a limit on turns is such a reason if it is now higher.
    """
    if not isinstance(error, CodeError) or error.type in ("BudgetExceeded", "DeadlineExceeded"):
        return True
    if error.type != "QueryError":
        return False
    turns: list[dict[str, Any]] = []
    if meta is not None and meta.queries.tree:
        turns = meta.queries.tree[0].get("trajectory", [])
    has_failed_turn = bool(turns) and turns[-1].get("failed")
    is_limit_raised = recursion is not None and not ends_at_limit(turns, recursion)
    return is_limit_raised or not has_failed_turn


@dataclass(frozen=True, slots=True)
class Upload:
    """A file of the host for a sandbox.

    A file with a digest belongs to one execution, which gets a new copy. Other files are sent to a sandbox once.
    """

    file: Path  # without links
    digest: str = ""  # SHA-256, in hexadecimal digits

    def read(self) -> bytes:
        """Return the file's content. Raises ConfigurationError if it has changed, or cannot be read any more."""
        try:
            with open_source(self.file) as descriptor, open(descriptor, "rb", closefd=False) as stream:
                data = stream.read()
        except OSError as error:
            raise ConfigurationError(
                f"the file {self.file} cannot be read any more: {error.strerror or error}"
            ) from None
        if self.digest and hashlib.sha256(data).hexdigest() != self.digest:
            raise ConfigurationError(f"the file {self.file} has changed since the run began: run it again")
        return data


# Returns the files of an execution, by their paths in the sandbox.
FindUploads = Callable[[Execution], Mapping[str, Upload]]


def with_index(outcome: OutcomeT, index: int, place: Place = NO_PLACE, *, is_reduction: bool = False) -> OutcomeT:
    """Set the index, the group and the repeat that an outcome has in this flow run, and return the outcome."""
    meta = replace(outcome.meta, index=index, group=place.group, repeat=place.repeat)
    outcome.meta = replace(meta, is_reduction=is_reduction)  # Earlier versions did not write this field.
    return outcome


def number_seed(index: int, place: Place) -> int | tuple[int, ...]:
    """Return the numbers from which an execution's seed is derived. The first repeat has the number of its group."""
    if place.group is None or place.repeat is None:
        return index
    return place.group if place.repeat == 0 else (place.group, place.repeat)


def build_pruned_result(meta: Meta, objective: str, fields: dict[str, Any] | None = None) -> Result:
    """Return a pruned trial's result: the last reported value as the objective, and the submitted fields."""
    _last_step, value = max(meta.reports)
    return Result({objective: value, **(fields or {})}, replace(meta, pruned=True))


def execution_to_json(execution: Execution) -> dict[str, Any]:
    """Return an execution as JSON values for a shard's file, without its index and its code."""
    variables, nonfinite = replace_nonfinite(execution.variables)
    encoded: dict[str, str] = {}
    for name, value in execution.encoded_variables.items():
        encoded[name] = value.json.decode("utf-8")
        nonfinite |= value.build_pointers(name)
    work: dict[str, Any] = {"key": execution.key, "variables": variables}
    if execution.place != NO_PLACE:
        work["place"] = execution.place
    if encoded:
        work["encoded"] = encoded
    if nonfinite:
        work["nonfinite"] = nonfinite
    if execution.unchecked_key:
        work["unchecked_key"] = execution.unchecked_key
    if execution.is_reduction:
        work["is_reduction"] = True
    return work


def execution_from_json(index: int, code: str, work: dict[str, Any]) -> Execution:
    """Return the execution from the JSON values of `execution_to_json`."""
    encoded = {name: EncodedVariable(text.encode("utf-8")) for name, text in work.get("encoded", {}).items()}
    for pointer, number in work.get("nonfinite", {}).items():
        # A pointer is "/NAME", or "/NAME/..." for a number within the variable's value.
        name = pointer.split("/")[1]
        if name in encoded:
            encoded[name].nonfinite[pointer.removeprefix(f"/{name}")] = number
        else:
            restore_numbers(work["variables"], {pointer: number})
    return Execution(
        index,
        code,
        work["variables"],
        work["key"],
        encoded,
        unchecked_key=work.get("unchecked_key", ""),
        is_reduction=work.get("is_reduction", False),
        place=Place(*work.get("place", ())),
    )


def assign_keys(
    items: Iterable[tuple[str, dict[str, Any]]],
    fingerprint: dict[str, Any],
    count_occurrence: Callable[[bytes], int] | None = None,
    repeats: Repeats | None = None,
    digests: Mapping[str, str] | None = None,
    warn: Callable[[str], None] | None = None,
) -> Iterator[Execution]:
    """Yield the executions of pairs of code and variables, with their indices and keys.

    The key is a SHA-256 over canonical JSON of the code, the variables, the fingerprint of the provider and of the
    language model, and a number that distinguishes identical executions. With a seed in the fingerprint, the key also
    depends on the index, because the execution's seed does. The first repeat has the key of a run without repeats.

    Args:
        items: The pairs of code and variables.
        fingerprint: The settings on which every result of the flow run depends.
        count_occurrence: Returns how often it was called with a digest. The default counts in memory.
        repeats: The repeats of the run, if it has any.
        digests: The digest of each execution's file, by the variable `path`, if executions have files.
        warn: Takes a warning of large variables, at most once.
    """
    counts: Counter[bytes] = Counter()
    last_digest, occurrence = b"", 0
    for index, (code, variables) in enumerate(items):
        place = locate_execution(repeats, index)
        settings = add_index(fingerprint, number_seed(index, place))
        if digests is not None:
            settings = {**settings, "file": digests[variables["path"]]}
        text = _write_key_parts(code, variables, settings)
        if warn is not None and len(text) > LARGE_BYTES:
            warn(
                f"execution {index} has {len(text) / 2**20:,.0f} MiB of code and variables, which are sent as JSON and "
                "stay in the ledger: pass the path of a file with `mounts` instead"
            )
            warn = None
        digest = hashlib.sha256(text).digest()
        unchecked_digest = _digest(code, variables, without_check(settings)) if "check" in settings else b""
        suffix = b""
        if place.repeat and digest == last_digest:
            # A later repeat is no further occurrence, so equal inputs keep their keys if the run is resumed with more
            # repeats.
            suffix = place.repeat.to_bytes(8, "big")
        elif count_occurrence is not None:
            last_digest, occurrence = digest, count_occurrence(digest)
        else:
            counts[digest] += 1
            last_digest, occurrence = digest, counts[digest]
        suffix = occurrence.to_bytes(8, "big") + suffix
        key = hashlib.sha256(digest + suffix).hexdigest()
        unchecked_key = hashlib.sha256(unchecked_digest + suffix).hexdigest() if unchecked_digest else ""
        yield Execution(index, code, variables, key, unchecked_key=unchecked_key, place=place)


def add_index(fingerprint: dict[str, Any], seed_numbers: int | tuple[int, ...]) -> dict[str, Any]:
    """Return the fingerprint of one execution. With a seed, it contains the numbers of the execution's seed."""
    return {**fingerprint, "index": seed_numbers} if "prepare_seed" in fingerprint else fingerprint


def without_check(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Return the fingerprint of a flow run that has no check and is otherwise the same."""
    return {name: value for name, value in fingerprint.items() if name != "check"}


def compute_key(
    code: str, variables: dict[str, Any], encoded_variables: dict[str, EncodedVariable], fingerprint: dict[str, Any]
) -> str:
    """Return the key of an execution. It is right only if the flow run has no other execution that is identical."""
    hashes = {name: value.compute_digest() for name, value in encoded_variables.items()}
    return _digest(code, variables, {**fingerprint, "encoded": hashes}).hex()


def _digest(code: str, variables: dict[str, Any], fingerprint: dict[str, Any]) -> bytes:
    return hashlib.sha256(_write_key_parts(code, variables, fingerprint)).digest()


def _write_key_parts(code: str, variables: dict[str, Any], fingerprint: dict[str, Any]) -> bytes:
    """Return canonical JSON of what a key depends on."""
    parts = {"code": code, "variables": variables, "provider": fingerprint}
    return json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=repr).encode()
