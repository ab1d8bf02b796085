"""Writes a run's trajectories to a directory: a file of JSON for each answer of a recursive language model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....blocks.storage.location import replace_atomically
from ....sandbox.errors import ConfigurationError
from ....sandbox.queries.session import RECORDED_CHARACTERS
from ....sandbox.result import Outcome, Result
from ..ledger_reader import LedgerReader
from .atif import build_trajectory


def check_directory(path: Path) -> None:
    """Returns if that is an empty directory, or can be made one. Raises ConfigurationError."""
    remedy = "name a new directory, or an empty one"
    try:
        if path.is_dir():
            if any(path.iterdir()):
                raise ConfigurationError(f"{path} is not empty: {remedy}")
            return
        nearest = next(above for above in (path, *path.parents) if above.is_symlink() or above.exists())
        if not nearest.is_dir():
            raise ConfigurationError(f"{nearest} is no directory: {remedy}")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}; {remedy}") from None


def write_trajectories(reader: LedgerReader, directory: Path) -> int:
    """Writes a file for each answer, whole or not at all; returns how many. An execution is in memory at a time.

    `trajectory-3.json` is that of execution 3, and where its code asked several recursive queries `trajectory-3-1.json`
    is that of the first. Raises OSError, and ConfigurationError where there is none to write.
    """
    session_id = reader.records[-1].flow_run_id or None
    count = 0
    for outcome in reader.read_outcomes():
        for name, document in _build_documents(outcome, session_id):
            if not count:
                directory.mkdir(parents=True, exist_ok=True)
            # What is half a surrogate pair no reader of UTF-8 would take.
            text = json.dumps(document, ensure_ascii=False, indent=2).encode("utf-8", "replace")
            with replace_atomically(directory / name) as partial:
                partial.write_bytes(text)
            count += 1
    if not count:
        raise ConfigurationError(
            f"{reader.ledger.path} has no trajectories: nothing in that run asked a recursive language model, as the "
            "flow rlm and the function rlm_query do"
        )
    return count


def _build_documents(outcome: Outcome, session_id: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The trajectories of an execution, with the names of their files."""
    records = [record for record in outcome.meta.queries.tree if record["kind"] == "rlm_query"]
    asked = outcome.meta.variables.get("query")
    answer = outcome.outputs.get("answer") if isinstance(outcome, Result) else None
    for number, record in enumerate(records, 1):
        name = f"{outcome.meta.index}" if len(records) == 1 else f"{outcome.meta.index}-{number}"
        # Of the flow rlm, and whatever passes its variable on as it is.
        is_whole = isinstance(asked, str) and asked[:RECORDED_CHARACTERS] == record["prompt"]
        yield (
            f"trajectory-{name}.json",
            build_trajectory(
                record,
                f"{session_id or 'run'}-{name}",
                session_id,
                question=asked if is_whole else None,
                answer=answer if len(records) == 1 and isinstance(answer, str) else "",
            ),
        )
