"""The results root, which is the default folder of new ledgers, its indexes, and the results of earlier runs.

An index is built from the ledgers and can be deleted at any time. A refresh reads only the new lines.
"""

import os
import re
import sqlite3
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...blocks.storage.location import make_private_directory, resolve_data_dir
from ...sandbox.queries.recursive_model import RecursionSettings
from ...sandbox.result import Failure, Result
from ..check import Check, archive_collected, restore_ended
from ..execution import Execution, is_interruption, with_index
from ..repeats import NO_PLACE
from .ledger import Ledger, list_files
from .ledger_line import LedgerLine, LinePosition, read_line, read_part_lines

SCHEMA = """
create table if not exists parts (path text primary key, size integer not null);
create table if not exists results (
    key text primary key, path text not null, start integer not null, length integer not null);
"""

SPILLED_FILE = re.compile(r"[0-9a-f]{24}\.(jsonl?|txt)")  # a hash of the content
ENDED = "ended "  # begins the keys of the index for executions' own outcomes
ReadKeys = Callable[[Path, int], Iterator[tuple[str | None, LinePosition]]]


def get_results_root() -> Path:
    """Return the directory that `RLM_BATCH_RESULTS` names, or the user's data directory.

    Raises ConfigurationError if the variable names a location that is not on this machine.
    """
    return resolve_data_dir("results", "RLM_BATCH_RESULTS")


def get_spill_directory() -> Path:
    """Return the directory for parameters that are too long for Prefect."""
    return get_results_root() / "inputs"


class PartIndex:
    """An index of lines by key, in the parts of every ledger directly below a root.

    `read_keys` yields the key and the position of each line in a part after an offset. The index skips lines whose key
    is None. The methods raise OSError if the disk is full or the index is damaged.
    """

    def __init__(self, root: Path, file_name: str, part_pattern: str, read_keys: ReadKeys) -> None:
        self._root = root
        make_private_directory(root)
        self._file = root / file_name
        self._file.touch(mode=0o600)
        self._part_pattern = part_pattern
        self._read_keys = read_keys

    def refresh(self) -> None:
        """Index the lines that were appended to the ledgers since the last call."""
        with self._open_database() as database, database:  # `with database` is one transaction.
            indexed_bytes: dict[str, int] = dict(database.execute("select path, size from parts"))
            for part in list_files(self._root, self._part_pattern):
                offset = indexed_bytes.get(str(part), 0)
                with suppress(FileNotFoundError):  # `rlm-batch prune` may delete it meanwhile.
                    if os.path.getsize(part) <= offset:
                        continue
                    for key, position in self._read_keys(part, offset):
                        offset = position.end
                        if key is not None:
                            database.execute("insert or replace into results values (?, ?, ?, ?)", (key, *position))
                database.execute("insert or replace into parts values (?, ?)", (str(part), offset))

    def find_position(self, key: str) -> LinePosition | None:
        """Return the position of the key's line at the last refresh, or None if there was no such line."""
        with self._open_database() as database:
            row = database.execute("select path, start, length from results where key = ?", (key,)).fetchone()
        return LinePosition(*row) if row else None

    @contextmanager
    def _open_database(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._file, timeout=30.0)) as database:
                database.executescript(SCHEMA)
                yield database
        except sqlite3.Error as error:
            raise OSError(
                f"the results' index {self._file} cannot be used ({error}): free some disk, or delete the "
                "file, which is rebuilt from the ledgers"
            ) from error


class ResultIndex(PartIndex):
    """An index of succeeded executions by key, in every ledger directly below a root."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "index.sqlite", "part-*.jsonl", _read_success_keys)

    def find_result(self, key: str) -> LedgerLine | None:
        """Return the line of a succeeded execution with that key, if a ledger still has it."""
        position = self.find_position(key)
        line = None if position is None else read_line(position)
        if line is None or line.key != key:
            return None  # The ledger was deleted or changed since the last refresh.
        return line if line.is_success else None

    def find_ended(self, key: str) -> LedgerLine | None:
        """Return the line with an execution's own outcome by its key without a check, if a ledger still has it."""
        position = self.find_position(ENDED + key)
        line = None if position is None else read_line(position)
        return line if line is not None and line.ended_key == key else None


def _read_success_keys(part: Path, offset: int) -> Iterator[tuple[str | None, LinePosition]]:
    for line in read_part_lines(part, offset):
        yield (line.key if line.is_success else None), line.position
        if line.ended_key:
            yield ENDED + line.ended_key, line.position


def find_ended_lines(lines: Iterable[LedgerLine], keys: Container[str] | None = None) -> dict[str, LedgerLine]:
    """Return the latest lines with an execution's own outcome by the key without a check: all, or those with `keys`."""
    found = (line for line in lines if line.ended_key and (keys is None or line.ended_key in keys))
    return {line.ended_key: line for line in sorted(found, key=lambda line: line.written_at)}


@dataclass(frozen=True, slots=True)
class ResultCache:
    """The results of earlier runs by keys, first from the run's own ledger and then from all ledgers."""

    ledger: Ledger
    lines: dict[str, LedgerLine]  # the ledger's lines by key when the run started, until their executions are looked up
    index: ResultIndex | None = None
    check: Check | None = None  # judges outcomes of earlier runs again, which it has not judged
    has_files: bool = False  # True if the ledgers have the files that the check needs
    warn_once: Callable[[str], None] = print  # is called with a reason why code runs again
    ended_lines: dict[str, LedgerLine] = field(default_factory=dict[str, LedgerLine])  # see `find_ended_lines`
    # the last line's key by an execution's index
    latest_keys: Mapping[int, str] = field(default_factory=dict[int, str])
    recursion: RecursionSettings | None = None  # the limits of the run's recursive queries

    def find_result(
        self, execution: Execution, should_take: Callable[[Result], bool] = lambda _result: True
    ) -> Result | None:
        """Return the result that the execution has from an earlier run, if `should_take` accepts it.

        An execution that only another check has judged gets its own outcome, so only the check runs. Call this once
        for each execution.
        """
        own_line = self.lines.pop(execution.key, None)
        if own_line is not None:
            outcome = own_line.to_outcome()
            if isinstance(outcome, Result) and should_take(outcome):
                is_latest = self.latest_keys.get(execution.index, execution.key) == execution.key
                if not is_latest and execution.place == NO_PLACE:
                    # Another job has run on the ledger since. Reports would take its outcome of this index.
                    self._write_to_own_ledger(execution, outcome)
                return outcome
            if isinstance(outcome, Failure) and not is_interruption(outcome.error, outcome.meta, self.recursion):
                execution.failed_at = own_line.written_at
        indexed_line = None if self.index is None else self.index.find_result(execution.key)
        if indexed_line is not None:
            outcome = indexed_line.to_outcome()
            if isinstance(outcome, Result) and should_take(outcome):
                self._write_to_own_ledger(execution, outcome)
                return outcome
        if self.check is not None and not execution.is_reduction and execution.unchecked_key:
            self._restore_ended(self.check, execution)
        return None

    def _restore_ended(self, check: Check, execution: Execution) -> None:
        """Set the execution's own outcome if a ledger has it, with the files that the check needs."""
        line = self.ended_lines.pop(execution.unchecked_key, None)
        if line is None and self.index is not None:
            line = self.index.find_ended(execution.unchecked_key)
        ended = None if line is None else restore_ended(line.to_outcome())
        if line is None or ended is None:
            return
        if check.needs_files:
            try:
                if not self.has_files:
                    raise ValueError("the run has no `collect`")
                execution.archive = archive_collected(Path(line.position.part).parent, ended.meta)
            except (OSError, ValueError) as error:
                self.warn_once(f"the check reads `folder`, so code runs again for it: {error}")
                return
            execution.archive_problems = ended.meta.not_collected
        execution.ended, execution.ended_earlier = with_index(ended, execution.index, execution.place), True

    def _write_to_own_ledger(self, execution: Execution, result: Result) -> None:
        outcome = with_index(result, execution.index, execution.place, is_reduction=execution.is_reduction)
        self.ledger.write_outcome(execution.key, outcome, execution.unchecked_key)
