"""Completion markers: files on a volume, each of which says that an execution that wrote there is complete.

A marker is a small file of JSON, written in the sandbox after everything that the code wrote. It holds the execution's
key, what the code submitted and the files that it wrote, as far as they are known. It counts only while those files are
there and none is newer than the marker: a job that was killed half way, or another that wrote the same files since, may
have left something else in them.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from ...sandbox.errors import ConfigurationError, OutcomeUnknown, RlmBatchError, VolumeError
from ...sandbox.interpreter import Interpreter
from ...sandbox.result import Result
from ...sandbox.wire.names import OWN_FILE_PREFIX
from ...sandbox.wire.submission import MAX_SUBMIT_DEPTH

VERSION = 1
WRITE_PROGRAM = "save_to_volume(path, text)"
REMOVE_PROGRAM = """
import os
try:
    os.remove(VOLUME + "/" + path)
except FileNotFoundError:
    pass
except OSError as error:
    raise VolumeError(f"what says that an earlier run was complete could not be removed: {error.strerror}") from None
"""
# Several at a time, because on a volume over a network each file is a round trip; as many to a page as SUBMIT takes.
# Code can write to where markers are, and what it leaves there must not end every later job: what is no regular file is
# not opened, and what SUBMIT would refuse is taken for a damaged marker. Each field that an execution has submitted is
# one of this one too, after its marker's number: within a marker it would stand deeper than it may.
READ_PROGRAM = """
import json, os, stat
from concurrent.futures import ThreadPoolExecutor

def depth(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)

def read(name):
    try:
        path = os.path.join(VOLUME, folder, name)
        entry = os.stat(path)
        if not stat.S_ISREG(entry.st_mode) or entry.st_size > 16_000_000:
            raise ValueError("it is no marker")
        with open(path, encoding="utf-8") as file:
            marker = json.load(file)
        json.dumps(marker, allow_nan=False, ensure_ascii=False).encode("utf-8")
        if max(map(depth, marker["outputs"].values()), default=0) > deepest:
            raise ValueError("it is nested too deeply")
        files, written, whole = list(map(str, marker["files"])), entry.st_mtime_ns, True
        for file in files:
            if os.stat(os.path.join(VOLUME, file)).st_mtime_ns > written:
                whole = False
        head = {"name": name, "whole": whole, "key": str(marker["key"]), "files": files}
        return {**head, "submitted": bool(marker["submitted"])}, marker["outputs"] if whole else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {"name": name, "whole": False}, {}

try:
    names = sorted(name for name in os.listdir(os.path.join(VOLUME, folder)) if name.isascii() and name > after)[:500]
except FileNotFoundError:
    names = []
markers, fields, size = [], {}, 0
with ThreadPoolExecutor(8) as pool:
    for name, (marker, outputs) in zip(names, pool.map(read, names)):
        length = len(json.dumps([marker, outputs])) + 10 * len(outputs)
        if length > 900_000:
            marker, outputs, length = {"name": name, "whole": False}, {}, 100
        if size + length > 900_000:
            break
        for field, value in outputs.items():
            fields[f"{len(markers)} {field}"] = value
        markers.append(marker)
        size += length
        after = name
SUBMIT(markers=markers, after=after, more=bool(names) and after != names[-1] or len(names) == 500, **fields)
"""


@dataclass(slots=True)
class MarkerLocation:
    """Where an execution's marker is on the volume; `stale` if one is there that does not count."""

    path: str
    is_stale: bool = False


@dataclass(frozen=True, slots=True)
class CompletionMarker:
    """A marker as it was read. `whole` if the files are there and as they were when it was written."""

    key: str = ""
    outputs: dict[str, Any] = field(default_factory=dict[str, Any])
    submitted: bool = False
    files: tuple[str, ...] = ()
    is_intact: bool = False


def compute_marker_folder(code: str) -> str:
    """The directory on the volume of the markers of one piece of code: jobs of other code on it have others."""
    return f"{OWN_FILE_PREFIX}/complete/{hashlib.sha256(code.encode('utf-8', 'replace')).hexdigest()[:32]}"


def compute_marker_name(execution_id: str) -> str:
    """The name of the marker of one execution of a job: an id may be of any length and have any letters."""
    return f"{hashlib.sha256(execution_id.encode('utf-8', 'replace')).hexdigest()[:32]}.json"


async def write_marker(interpreter: Interpreter, path: str, key: str, result: Result) -> None:
    """Writes a marker. Raises VolumeError where the volume does not take it, OutcomeUnknown where nobody knows."""
    marker = {
        "version": VERSION,
        "key": key,
        "outputs": result.outputs,
        "submitted": result.meta.submitted,
        "files": result.meta.files,
    }
    try:
        await interpreter.execute(WRITE_PROGRAM, {"path": path, "text": json.dumps(marker, ensure_ascii=False)})
    except VolumeError as error:
        raise VolumeError(
            f"the code has run, but that it is complete could not be written to the volume, so that it counts as "
            f"failed: {error}"
        ) from error
    except ConfigurationError:
        raise
    except RlmBatchError as error:
        raise OutcomeUnknown(
            f"the code has run, but that it is complete could not be written to the volume ({error.summary}). Pass "
            "idempotent=True if it may run twice"
        ) from error


async def remove_marker(interpreter: Interpreter, path: str) -> None:
    """Removes a stale marker, before its execution is run again."""
    await interpreter.execute(REMOVE_PROGRAM, {"path": path})


async def read_markers(interpreter: Interpreter, folder: str) -> dict[str, CompletionMarker]:
    """The markers in a directory of the volume, by their names."""
    markers: dict[str, CompletionMarker] = {}
    after, more = "", True
    while more:
        page = await interpreter.execute(READ_PROGRAM, {"folder": folder, "after": after, "deepest": MAX_SUBMIT_DEPTH})
        outputs: list[dict[str, Any]] = [{} for _ in page["markers"]]
        for name, value in page.outputs.items():
            number, separator, field_name = name.partition(" ")
            if separator:
                outputs[int(number)][field_name] = value
        for data, submitted in zip(page["markers"], outputs, strict=True):
            markers[data["name"]] = (
                CompletionMarker(data["key"], submitted, data["submitted"], tuple(data["files"]), is_intact=True)
                if data["whole"]
                else CompletionMarker()
            )
        after, more = page["after"], page["more"]
    return markers
