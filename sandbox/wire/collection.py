"""Which files of a working folder an execution brings home: patterns, paths and limits, as both ends know them.

A pattern is a path below the folder. `*`, `?` and `[...]` stand for what is in a name, and `**` for directories, none
or several. As in a shell, none of them stands for a name that begins with a dot.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_COLLECTED_BYTES = 1024 * 1024 * 1024  # of an execution's files, together; less where its disk_mib is less
MAX_COLLECTED_FILES = 10_000  # of an execution
MAX_COLLECTED_DIRECTORIES = 10_000  # that an execution's files are in
MAX_REFUSALS = 100  # that are named; of others there is their number
MAX_PATTERN_CHARACTERS = 8_000  # of all patterns: they go in a header
MAX_PATH_BYTES = 1_000  # so that there is room for the directory that it comes to be in
MAX_NAME_BYTES = 255
MAX_DEPTH = 50  # directories inside one another that are looked into: each takes a descriptor
COLLECT_TIMEOUT_SECONDS = 600.0  # for the files of one execution: 1 GiB at 2 MB a second

Steps = frozenset["tuple[str, ...]"]  # what is left of each pattern that the way so far fits


def parse_pattern(pattern: str) -> tuple[str, ...]:
    """The names on the way that a pattern describes. Raises ValueError, with a reason, for one that leads elsewhere."""
    if pattern.startswith("/"):
        raise ValueError("it is absolute: patterns are of paths below the working folder")
    names = [name for name in pattern.split("/") if name not in ("", ".")]
    if ".." in names:
        raise ValueError("it leads out of the working folder")
    if not names:
        raise ValueError("it is empty: ** stands for all files")
    if not pattern.isprintable():
        raise ValueError("it has characters that cannot be printed")
    if pattern.endswith("/"):
        names.append("**")
    if names[-1] == "**":
        names.append("*")
    return tuple(names)


def is_literal(name: str) -> bool:
    """Whether a name of a pattern stands for itself alone."""
    return not any(character in name for character in "*?[")


def begin_steps(patterns: Iterable[tuple[str, ...]]) -> Steps:
    """The steps of patterns at the folder itself."""
    return _skip_directories(set(patterns))


def take_step(steps: Steps, name: str) -> Steps:
    """The steps that are left below that name. What is there is matched where none is left of one: see `is_match`."""
    from fnmatch import fnmatchcase  # which takes `re` along, and most sandboxes collect nothing

    below: set[tuple[str, ...]] = set()
    for step in steps:
        if not step:
            continue
        first = step[0]
        if is_literal(first):
            if first == name:
                below.add(step[1:])
        elif not name.startswith(".") or first.startswith("."):
            if first == "**":
                below.add(step)
            elif fnmatchcase(name, first):
                below.add(step[1:])
    return _skip_directories(below)


def is_match(steps: Steps) -> bool:
    """Whether the way to here is one that a pattern describes."""
    return () in steps


def matches(path: str, patterns: Iterable[tuple[str, ...]]) -> bool:
    """Whether a path fits one of the patterns."""
    steps = begin_steps(patterns)
    for name in path.split("/"):
        steps = take_step(steps, name)
    return is_match(steps)


def list_directories(path: str) -> list[str]:
    """Return the directories on the way to a file, the innermost first."""
    directories: list[str] = []
    while "/" in path:
        path = path.rpartition("/")[0]
        directories.append(path)
    return directories


def find_path_problem(path: str) -> str:
    """Why a file with this path is not brought home; empty where it can be."""
    names = path.split("/")
    if any(name in ("", ".", "..") for name in names):
        return "leads out of the working folder"
    if not path.isprintable():
        return "has a name with characters that cannot be printed"
    if len(names) > MAX_DEPTH + 1:
        return f"is more than {MAX_DEPTH} directories deep"
    if len(path.encode("utf-8")) > MAX_PATH_BYTES or any(len(name.encode("utf-8")) > MAX_NAME_BYTES for name in names):
        return f"has a path of more than {MAX_PATH_BYTES:,} bytes"
    return ""


def _skip_directories(steps: set[tuple[str, ...]]) -> Steps:
    """The steps, and those that are left where `**` stands for no directory at all."""
    skipped = set(steps)
    for step in steps:
        while step and step[0] == "**":
            step = step[1:]
            skipped.add(step)
    return frozenset(skipped)
