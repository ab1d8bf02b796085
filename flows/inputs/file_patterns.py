"""Patterns of files, such as csv/*.csv: one execution for each file, which is sent to the execution's sandbox."""

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

from ...blocks.host_files.source_tree import open_source
from ...blocks.storage.location import PathOrLocation
from ...blocks.storage.location_parsing import is_remote, parse_location
from ...blocks.worker_consent import find_link_on_volume, resolve_links
from ...sandbox.caller import get_caller, name_parameter
from ...sandbox.errors import ConfigurationError
from ...tasks.execution import Execution, Upload
from .host_paths import check_input_path
from .tables import LARGE_BYTES, Report

FOLDER = "inputs"  # folder of the files in the sandbox's working folder
# The host has a file in memory while it sends the file to a sandbox.
MAX_FILE_BYTES = 256 * 1024 * 1024
MAX_SHOWN = 60  # characters of JSON in a message


def is_pattern(text: str) -> bool:
    """Return whether a text is a pattern: it has *, ? or [, and is neither JSON nor itself the path of a file."""
    is_json = text.lstrip().startswith(("{", "[{", "[["))
    return glob.has_magic(text) and not is_json and not is_remote(text) and not os.path.lexists(_locate(text))


def refuse_json(text: str) -> None:
    """Raise ConfigurationError if a text is a list or an object of JSON in the place of a path."""
    try:
        is_json = text.lstrip()[:1] in ("[", "{") and isinstance(json.loads(text), (list, dict))
    except (ValueError, RecursionError):
        return
    if is_json and not os.path.lexists(_locate(text)):
        remedy = (
            "write it to a file, such as in.json, and pass the file's name"
            if get_caller().is_command
            else "pass the values instead of their JSON"
        )
        shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
        raise ConfigurationError(f"{shown} is JSON, and a text is taken as the path of a file: {remedy}")


class MatchedFiles:
    """The files that match a pattern, in the order of their paths, as inputs with the variable `path`.

    `path` is relative to the sandbox's working folder: `inputs/`, and the part of the file's path after the directories
    that the pattern names without wildcards. Characters that cannot be printed are escaped, as in %0A.

    Attributes:
        digests: The SHA-256 of each file's content, by `path`.
    """

    def __init__(self, pattern: str, report: Report | None = None) -> None:
        """Find the files and read them for their digests.

        Raises:
            ConfigurationError: No file matches, a file is too large, not allowed or cannot be read, or its name is not
                UTF-8.
        """
        base, rest = _split_pattern(_locate(pattern))
        self._files: dict[str, Path] = {}
        size = 0
        matched, left_out = match_files(base, rest)
        for name, real in matched.items():
            try:
                name.encode()
            except UnicodeEncodeError:
                raise ConfigurationError(f"the name of {base / name} is not UTF-8: rename it") from None
            if (length := real.stat().st_size) > MAX_FILE_BYTES:
                raise ConfigurationError(
                    f"{base / name} has {length >> 20:,} MiB, and a file of {name_parameter('inputs')} at most "
                    f"{MAX_FILE_BYTES >> 20}: pass the paths as variables, and their directory with "
                    f"{name_parameter('mounts')}"
                )
            size += length
            path = f"{FOLDER}/{_escape_name(name)}"
            if path in self._files:
                raise ConfigurationError(f"two files would have the path {path}: rename {base / name}")
            self._files[path] = real
        note = f"{base / left_out[0]} leads out of {base}, so it is left out" if left_out else ""
        if not self._files:
            raise ConfigurationError(f"no file matches {pattern}: {note or _advise(base, rest)}")
        if report is not None and note:
            report(note if len(left_out) == 1 else f"{note}, as {len(left_out) - 1:,} more links")
        if report is not None and size >= LARGE_BYTES:
            report(f"reading {len(self._files):,} files, {size / 1e6:,.0f} MB")
        self.digests = {path: _compute_digest(file) for path, file in self._files.items()}

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"path": path} for path in self._files)

    def find_uploads(self, execution: Execution) -> Mapping[str, Upload]:
        """Return the file of an execution, by its path in the sandbox."""
        path = execution.variables["path"]
        return {path: Upload(self._files[path], self.digests[path])}


def match_files(base: Path, pattern: str) -> tuple[dict[str, Path], list[str]]:
    """Return the files below a directory that match a pattern, without links, and the names of links that lead out.

    The files are sorted by their names below the directory. A link to a file in the directory is a file of its own.
    `**` enters no links to directories. If such links give a file several paths, it has only the first one without
    them.

    Raises:
        ConfigurationError: The run may not read the directory, or what a link leads to.
    """
    root = resolve_links(check_input_path(base)) or base
    hidden = [part for part in PurePath(pattern).parts if part.startswith(".")]
    files: dict[tuple[Path, str], tuple[bool, str, Path]] = {}
    folders: dict[Path, Path] = {}  # directories without links by their paths
    left_out: list[str] = []
    # `Path.glob` takes `**` only as a whole part, and matches no files with it as the last one.
    parts = [part if part == "**" else re.sub("[*]{2,}", "*", part) for part in PurePath(pattern).parts]
    for path in root.glob("/".join([*parts, "*"] if parts[-1] == "**" else parts)):
        name = str(path.relative_to(root))
        if any(
            part.startswith(".") and not any(fnmatchcase(part, own) for own in hidden) for part in PurePath(name).parts
        ):
            continue
        if path.parent not in folders:
            folders[path.parent] = resolve_links(path.parent) or path.parent
        folder = folders[path.parent]
        real = (resolve_links(path) or path) if path.is_symlink() else folder / path.name
        if not real.is_file():
            continue
        if not real.is_relative_to(root) or (real != path and find_link_on_volume(path) is not None):
            check_input_path(real)
            left_out.append(name)
            continue
        file = (folder != path.parent, name, real)
        key = (folder, path.name)
        files[key] = min(file, files.get(key, file))
    return {name: real for _, name, real in sorted(files.values(), key=lambda file: file[1])}, sorted(left_out)


def refuse_pattern(text: str) -> None:
    """Raise ConfigurationError if a text is JSON or a pattern, where only the path of a single file is possible."""
    refuse_json(text)
    if is_pattern(text):
        raise ConfigurationError(
            f"{text} is a pattern, which only {name_parameter('inputs')} of batch takes: name one file, or a folder of "
            "Parquet files"
        )


def _locate(text: str) -> Path:
    place: PathOrLocation = parse_location(text)
    assert isinstance(place, Path)
    return place


def _split_pattern(pattern: Path) -> tuple[Path, str]:
    """Return the directory before the first part with a wildcard, and the rest of the pattern."""
    parts = pattern.parts
    number = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:number]), os.path.join(*parts[number:])


def _escape_name(name: str) -> str:
    """Return the name with %0A for a line break, and so on. Daytona refuses control characters in paths."""
    return "".join(character if character.isprintable() else f"%{ord(character):02X}" for character in name)


def _advise(base: Path, rest: str) -> str:
    if not base.is_dir():
        return f"there is no directory {base}"
    if match_files(base, os.path.join("**", os.path.basename(rest)))[0]:
        return f"files in directories below need {base}/**/{os.path.basename(rest)}"
    return f"{base} has no such file"


def _compute_digest(file: Path) -> str:
    try:
        with open_source(file) as fd, open(fd, "rb", closefd=False) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ConfigurationError(f"the input file {file} cannot be read: {error.strerror or error}") from None
