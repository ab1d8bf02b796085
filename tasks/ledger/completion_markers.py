"""Completion markers: files on a volume, each of which says that an execution that wrote there is complete.

A marker is a small file of JSON, written in the sandbox after everything that the code wrote. It holds the execution's
key, what the code submitted, the files that it wrote, as far as they are known, and the host's signature. It counts
only while those files are there and none is newer than the marker: a job that was killed half way, or another that
wrote the same files since, may have left something else in them.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...sandbox.errors import ConfigurationError, OutcomeUnknown, RlmBatchError, VolumeError
from ...sandbox.interpreter import Interpreter
from ...sandbox.result import Result
from ...sandbox.wire.names import MAX_REPORTED_FILES, OWN_FILE_PREFIX
from ...sandbox.wire.nonfinite import encode_values, replace_nonfinite, restore_numbers
from ...sandbox.wire.strict_json import NotJsonError, loads
from ...sandbox.wire.submission import MAX_SUBMIT_BYTES, check_limits
from .marker_signature import MarkerSigner

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

# Code can write to where markers are, and what it leaves there must not end a later job, nor hold it up for long: what
# is no regular file or too large is not read, and neither is what the job does not ask for.
MAX_MARKER_BYTES = MAX_SUBMIT_BYTES + 256 * 1024  # what SUBMIT takes, and the names of files
MAX_ENTRIES = 1_000_000  # in the markers' directory
READ_SECONDS, READ_SECONDS_PER_MARKER = 60.0, 0.25  # for all of them together
PAGE_SECONDS, PAGE_TIMEOUT_SECONDS = 20.0, 120.0  # after which no more is begun, and after which the sandbox is stuck
PAGE_NAMES = 500
PIECE_CHARACTERS = 150_000  # of a text, of which JSON makes six times as many bytes at most
LIST_PROGRAM = """
import itertools, os
names, error = [], ""
try:
    with os.scandir(os.path.join(VOLUME, folder)) as entries:
        for entry in itertools.islice(entries, most):
            if len(entry.name) <= 40 and entry.name.isascii() and entry.name[:-5].isalnum() and entry.name > after:
                names.append(entry.name)
except FileNotFoundError:
    pass
except OSError as failure:
    error = failure.strerror
names.sort()
SUBMIT(names=names[:20_000], more=len(names) > 20_000, error=error)
"""
# Several at a time, because on a volume over a network each file is a round trip; as many to a page as SUBMIT takes. A
# text goes home as it is, and is parsed there only if it is signed.
READ_PROGRAM = """
import hashlib, json, os, stat, threading, time
from concurrent.futures import ThreadPoolExecutor

end, is_full = time.monotonic() + seconds, False
parsing = threading.Lock()  # one at a time: in memory a text may become forty times as large

def read(name):
    if is_full or time.monotonic() > end:
        return None
    try:
        path = os.path.join(VOLUME, folder, name)
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            entry = os.fstat(fd)
            if not stat.S_ISREG(entry.st_mode):
                raise ValueError("it is no marker")
            if entry.st_size > limit:
                return {"name": name, "is_large": True}
            text = file.read(limit + 1).decode()
        with parsing:
            marker = json.loads(text)
            outputs = marker["outputs"]
            if "nonfinite" in marker:
                outputs = [outputs, marker["nonfinite"]]
            digest = hashlib.sha256(json.dumps(outputs, sort_keys=True).encode()).hexdigest()
            key, files = str(marker["key"])[:100], marker["files"]
            del marker, outputs
        if len(files) > most_files:
            raise ValueError("it has more files than are reported")
        for file in files:
            if os.stat(os.path.join(VOLUME, file)).st_mtime_ns > entry.st_mtime_ns:
                raise ValueError("a file is newer")
        return {"name": name, "key": key, "digest": digest, "text": text}
    except (OSError, ValueError, KeyError, TypeError, RecursionError, MemoryError):
        return {"name": name}

markers, size = [], 0
with ThreadPoolExecutor(8) as pool:
    for marker in pool.map(read, names):
        if marker is None or is_full:
            continue
        length = len(json.dumps(marker))
        if length > 900_000:
            marker["size"] = len(marker.pop("text"))
            length = 300
        is_full = size + length > 900_000
        if not is_full:
            markers.append(marker)
            size += length
SUBMIT(markers=markers)
"""
PIECE_PROGRAM = """
import os
try:
    with open(os.open(os.path.join(VOLUME, folder, name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        piece = file.read(limit).decode()[begin:end]
except (OSError, ValueError):
    piece = ""
SUBMIT(piece)
"""


@dataclass(slots=True)
class MarkerLocation:
    """Where an execution's marker is on the volume; `stale` if one is there that does not count."""

    path: str
    is_stale: bool = False


@dataclass(frozen=True, slots=True)
class CompletionMarker:
    """A marker as it was read. `is_intact` if it is one, and its files are there and as they were when it was written.

    `is_trusted` says that the host has written what it holds, or is to believe so: of another there is the digest of
    its outputs, for a ledger's to be held against. `is_read` is False where it was too large, or there was no time.
    """

    key: str = ""
    outputs: dict[str, Any] = field(default_factory=dict[str, Any])
    outputs_digest: str = ""
    submitted: bool = False
    files: tuple[str, ...] = ()
    is_intact: bool = False
    is_trusted: bool = False
    is_read: bool = True


def compute_marker_folder(code: str) -> str:
    """The directory on the volume of the markers of one piece of code: jobs of other code on it have others."""
    return f"{OWN_FILE_PREFIX}/complete/{hashlib.sha256(code.encode('utf-8', 'replace')).hexdigest()[:32]}"


def compute_marker_name(execution_id: str) -> str:
    """The name of the marker of one execution of a job: an id may be of any length and have any letters."""
    return f"{hashlib.sha256(execution_id.encode('utf-8', 'replace')).hexdigest()[:32]}.json"


def compute_outputs_digest(outputs: dict[str, Any]) -> str:
    """A digest by which two results have the same outputs."""
    plain, nonfinite = replace_nonfinite(outputs)
    return hashlib.sha256(json.dumps([plain, nonfinite] if nonfinite else plain, sort_keys=True).encode()).hexdigest()


async def write_marker(interpreter: Interpreter, path: str, key: str, result: Result, signer: MarkerSigner) -> None:
    """Writes a marker. Raises VolumeError where the volume does not take it, OutcomeUnknown where nobody knows."""
    outputs, nonfinite = replace_nonfinite(result.outputs)
    marker = {
        "version": VERSION,
        "key": key,
        "outputs": outputs,
        **({"nonfinite": nonfinite} if nonfinite else {}),
        "submitted": result.meta.submitted,
        "files": result.meta.files,
    }
    text = signer.sign(path, json.dumps(marker, ensure_ascii=False, separators=(",", ":")))
    try:
        await interpreter.execute(WRITE_PROGRAM, {"path": path, "text": text})
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


async def read_markers(
    interpreter: Interpreter,
    folder: str,
    find_names: Callable[[], set[str]],
    signer: MarkerSigner,
    *,
    trusts_unsigned: bool = False,
) -> dict[str, CompletionMarker]:
    """The markers in a directory of the volume, by their names.

    `find_names` is asked for the names that matter where there are any, in a thread: no others are read. Markers that
    the signer has not signed count as the host's own only with `trusts_unsigned`. Raises VolumeError where the
    directory is there and cannot be read.
    """
    end = time.monotonic() + READ_SECONDS
    there = await _list_names(interpreter, folder, end)
    names = sorted(there & await asyncio.to_thread(find_names)) if there else []
    end += READ_SECONDS_PER_MARKER * len(names)
    markers: dict[str, CompletionMarker] = {}
    while names and (left := end - time.monotonic()) > 0:
        page, rest = names[:PAGE_NAMES], names[PAGE_NAMES:]
        variables = {"folder": folder, "names": page, "seconds": min(left, PAGE_SECONDS)}
        limits = {"limit": MAX_MARKER_BYTES, "most_files": MAX_REPORTED_FILES}
        found = await interpreter.execute(READ_PROGRAM, variables | limits, timeout=PAGE_TIMEOUT_SECONDS)
        if not found["markers"]:
            break
        texts: dict[str, str] = {}
        for marker in found["markers"]:
            name = marker["name"]
            if "digest" not in marker:
                markers[name] = CompletionMarker(is_read="is_large" not in marker)
                continue
            markers[name] = CompletionMarker(marker["key"], outputs_digest=marker["digest"], is_intact=True)
            if "size" in marker:
                texts[name] = await _read_in_pieces(interpreter, folder, name, marker["size"])
            else:
                texts[name] = marker["text"]
        markers.update(await asyncio.to_thread(_parse_trusted, folder, texts, signer, trusts_unsigned))
        names = [name for name in page if name not in markers] + rest
    return {**markers, **dict.fromkeys(names, CompletionMarker(is_read=False))}


async def _list_names(interpreter: Interpreter, folder: str, end: float) -> set[str]:
    """The names of what may be markers in the directory; not all of them where it takes too long."""
    names: set[str] = set()
    after, more = "", True
    while more:
        variables = {"folder": folder, "after": after, "most": MAX_ENTRIES}
        page = await interpreter.execute(LIST_PROGRAM, variables, timeout=PAGE_TIMEOUT_SECONDS)
        if page["error"]:
            raise VolumeError(
                f"the completion markers in {folder} on the volume cannot be read: {page['error']}. Remove that from "
                "the volume to run every chunk again"
            )
        names.update(page["names"])
        after, more = max(page["names"], default=""), page["more"] and time.monotonic() < end
    return names


async def _read_in_pieces(interpreter: Interpreter, folder: str, name: str, size: int) -> str:
    """The text of a marker that is too large for one SUBMIT."""
    pieces: list[str] = []
    for begin in range(0, size, PIECE_CHARACTERS):
        variables = {"folder": folder, "name": name, "limit": MAX_MARKER_BYTES}
        place = {"begin": begin, "end": begin + PIECE_CHARACTERS}
        piece = await interpreter.execute(PIECE_PROGRAM, variables | place, timeout=PAGE_TIMEOUT_SECONDS)
        pieces.append(piece["output"])
    return "".join(pieces)


def _parse_trusted(
    folder: str, texts: dict[str, str], signer: MarkerSigner, trusts_unsigned: bool
) -> dict[str, CompletionMarker]:
    """The markers of those texts that are signed, or of all."""
    return {
        name: _parse_marker(text)
        for name, text in texts.items()
        if trusts_unsigned or signer.is_signed(f"{folder}/{name}", text)
    }


def _parse_marker(text: str) -> CompletionMarker:
    """The marker; one that is not intact for a text that is none, which an unsigned one may be."""
    try:
        data = loads(text)
        outputs = data["outputs"]
        restore_numbers(outputs, data.get("nonfinite", {}))
        check_limits(outputs, encode_values(outputs)[0])  # what SUBMIT would have refused is no result
        return CompletionMarker(
            key=str(data["key"]),
            outputs=outputs,
            submitted=bool(data["submitted"]),
            files=tuple(map(str, data["files"])),
            is_intact=True,
            is_trusted=True,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, NotJsonError):
        return CompletionMarker()
