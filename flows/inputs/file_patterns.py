"""Patterns of files, such as csv/*.csv: one execution for each file, which is sent to the execution's sandbox."""

import glob
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from io import BufferedReader
from pathlib import Path, PurePath
from typing import Any

from ...blocks.host_files.source_tree import open_source
from ...blocks.storage.location_parsing import is_remote, parse_location
from ...blocks.worker_consent import find_link_on_volume, resolve_links
from ...sandbox.errors import ConfigurationError
from ...tasks.execution import Execution, Upload
from .host_paths import check_input_path
from .tables import ProgressReport

FOLDER = "inputs"  # folder of the files in the sandbox's working folder
# The host has a file in memory while it sends the file to a sandbox.
MAX_FILE_BYTES = 256 * 1024 * 1024


def is_pattern(text: str) -> bool:
    """Return True if a text is a pattern: it has *, ? or [, and is not itself the path of a file."""
    return glob.has_magic(text) and not is_remote(text) and not os.path.lexists(str(parse_location(text)))


class MatchedFiles:
    """The files that match a pattern, in the order of their paths, as inputs with the variable `path`.

    `path` is the file's path in the sandbox: for `/data/*/x.csv`, it is `inputs/a/x.csv`. A character that cannot be
    printed is escaped, such as a line break as %0A. `digests` has the SHA-256 of each file's content, by `path`.
    """

    def __init__(self, pattern: str, report: ProgressReport | None = None) -> None:
        """Find the files and read them for their digests.

        Raises ConfigurationError if no file matches, or a file is too large, not allowed or cannot be read.
        """
        parts = Path(str(parse_location(pattern))).parts
        number = next(number for number, part in enumerate(parts) if glob.has_magic(part))
        base = Path(*parts[:number])
        self._files: dict[str, Path] = {}
        matched, left_out = match_files(base, os.path.join(*parts[number:]))
        for name, real in matched.items():
            size = real.stat().st_size
            if size > MAX_FILE_BYTES:
                raise ConfigurationError(
                    f"{base / name} has {size >> 20:,} MiB, and a file of `inputs` at most "
                    f"{MAX_FILE_BYTES >> 20}: pass the paths as variables, and their directory with "
                    f"`mounts`"
                )
            # Daytona refuses control characters in paths.
            path = f"{FOLDER}/" + "".join(c if c.isprintable() else f"%{ord(c):02X}" for c in name)
            if path in self._files:
                raise ConfigurationError(f"two files would have the path {path}: rename {base / name}")
            self._files[path] = real
        note = f"{base / left_out[0]} leads out of {base}, so it is left out" if left_out else ""
        if not self._files:
            raise ConfigurationError(f"no file matches {pattern}: {note or 'only ** searches directories below'}")
        if report is not None and note:
            report(note if len(left_out) == 1 else f"{note}, as {len(left_out) - 1:,} more links")
        self.digests = {path: compute_file_digest(file) for path, file in self._files.items()}

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"path": path} for path in self._files)

    def find_uploads(self, execution: Execution) -> Mapping[str, Upload]:
        """Return the file of an execution, by its path in the sandbox."""
        path = execution.variables["path"]
        return {path: Upload(self._files[path], self.digests[path])}


def match_files(base: Path, pattern: str) -> tuple[dict[str, Path], list[str]]:
    """Return the files below a directory that match a pattern, and the names of matching links that lead out of it.

    Both have the names of paths below the directory, and are sorted by them. A link to a file in the directory counts
    as a file of its own. Links to directories are not entered. Raises ConfigurationError if the run may not read a
    file.
    """
    root = resolve_links(check_input_path(base)) or base
    files: dict[str, Path] = {}
    left_out: list[str] = []
    for path in root.glob(_prepare_for_glob(pattern)):
        name = path.relative_to(root)
        if _has_hidden_part(name, pattern):
            continue
        real = resolve_links(path) or path
        if not real.is_file():
            continue
        is_link = real != path
        leads_out = not real.is_relative_to(root) or (is_link and find_link_on_volume(path) is not None)
        if leads_out:
            check_input_path(real)
            left_out.append(str(name))
        elif not is_link or resolve_links(path.parent) == path.parent:  # A link's directory must not be a link.
            files[str(name)] = real
    return dict(sorted(files.items())), sorted(left_out)


def _prepare_for_glob(pattern: str) -> str:
    """Adapt a pattern to `Path.glob`, which refuses `**` inside a part, and finds no files if `**` is the last part."""
    parts = [part if part == "**" else re.sub("[*]{2,}", "*", part) for part in PurePath(pattern).parts]
    if parts[-1] == "**":
        parts.append("*")
    return "/".join(parts)


def _has_hidden_part(name: PurePath, pattern: str) -> bool:
    """Return True if a part of the name begins with a dot, and the pattern does not ask for it, as `.conf*/x` does."""
    hidden_patterns = [part for part in PurePath(pattern).parts if part.startswith(".")]
    for part in name.parts:
        if part.startswith(".") and not any(fnmatchcase(part, hidden) for hidden in hidden_patterns):
            return True
    return False


def refuse_pattern(text: str) -> None:
    """Raise ConfigurationError if a text is a pattern, where only the path of a single file is possible."""
    if is_pattern(text):
        raise ConfigurationError(
            f"{text} is a pattern, which only `inputs` of batch takes: name one file, or a folder of Parquet files"
        )


@contextmanager
def open_file(path: Path) -> Iterator[BufferedReader]:
    """Open a file without following links. Raises OSError."""
    with open_source(path) as fd, open(fd, "rb", closefd=False) as file:
        yield file


def compute_file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content. Raises ConfigurationError if it cannot be read."""
    try:
        with open_file(path) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ConfigurationError(f"the input file {path} cannot be read: {error.strerror or error}") from None
