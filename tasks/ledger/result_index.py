"""The results root, where ledgers are made by default, and its index: which of them holds the result of a key.

The index is made from the ledgers and can be deleted at any time; only what was appended since the last look is read
again.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from ...blocks.storage.data_dirs import resolve_data_dir
from ...blocks.storage.location_parsing import is_remote, parse_location, parse_scheme
from ...sandbox.errors import ConfigurationError
from .ledger_line import LedgerLine, LinePosition, read_line, read_part_lines

SCHEMA = """
create table if not exists parts (path text primary key, size integer not null);
create table if not exists results (
    key text primary key, path text not null, start integer not null, length integer not null);
"""


def get_results_root() -> Path:
    """The directory that `RLM_BATCH_RESULTS` names, or the user's data directory.

    Raises ConfigurationError where that variable names a location that is no directory of this machine.
    """
    text = os.environ.get("RLM_BATCH_RESULTS", "")
    if is_remote(text):
        raise ConfigurationError(
            f"RLM_BATCH_RESULTS is {text}, and must be a directory of this machine: it has an index and large "
            "parameters too. Name the location with results_path"
        )
    if parse_scheme(text) is not None:
        return Path(str(parse_location(text)))
    return resolve_data_dir("results", "RLM_BATCH_RESULTS")


class ResultIndex:
    """Finds succeeded executions by key in every ledger directly below a root.

    Its methods raise OSError where the index cannot be read or written: on a full disk, or when the file is damaged.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)
        self._file = root / "index.sqlite"

    def refresh(self) -> None:
        """Reads what was appended to the ledgers since the last call."""
        with self._open_database() as database, database:
            sizes: dict[str, int] = dict(database.execute("select path, size from parts"))
            for part in self._root.glob("*/part-*.jsonl"):
                path, end = str(part), sizes.get(str(part), 0)
                if os.path.getsize(part) <= end:
                    continue
                for line in read_part_lines(part, end):
                    _, start, length = line.position
                    end = line.position.end
                    if line.is_success:
                        database.execute(
                            "insert or replace into results values (?, ?, ?, ?)", (line.key, path, start, length)
                        )
                database.execute("insert or replace into parts values (?, ?)", (path, end))

    def find_result(self, key: str) -> LedgerLine | None:
        """The line of a succeeded execution with that key, if any ledger still has it."""
        with self._open_database() as database:
            row = database.execute("select path, start, length from results where key = ?", (key,)).fetchone()
        line = read_line(LinePosition(*row)) if row else None
        return line if line is not None and line.key == key and line.is_success else None

    @contextmanager
    def _open_database(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._file, timeout=30.0)) as database:
                database.executescript(SCHEMA)
                yield database
        except sqlite3.Error as error:
            raise OSError(
                f"the index of the results, {self._file}, cannot be used ({error}): make room if its disk is full; "
                "otherwise delete it, for it is made again from the ledgers"
            ) from error
