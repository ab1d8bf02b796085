"""Patterns, paths and limits of the files that the host collects from a sandbox's working folder.

A pattern is a path below the folder. `*`, `?` and `[...]` match within one name, and `**` matches any number of
directories. As in a shell, none of them matches a name that begins with a dot.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_COLLECTED_BYTES = 1024 * 1024 * 1024  # all files of one execution; a smaller disk_mib lowers this limit
MAX_COLLECTED_FILES = 10_000  # per execution
MAX_COLLECTED_DIRECTORIES = 10_000  # directories that contain files of one execution
MAX_REFUSALS = 100  # refused files that are named; more refused files are only counted
MAX_PATTERN_CHARACTERS = 8_000  # all patterns together, because a header carries them
MAX_PATH_BYTES = 1_000  # leaves room for the path of the results folder
MAX_NAME_BYTES = 255
MAX_DEPTH = 50  # nested directories; each level takes a file descriptor
COLLECT_TIMEOUT_SECONDS = 600.0  # limit for all files of an execution: 1 GiB at 2 MB/s takes 537 s

# The rests of the patterns whose beginnings match a path. The rest () means that the path matches a whole pattern.
Steps = frozenset["tuple[str, ...]"]


def parse_pattern(pattern: str) -> tuple[str, ...]:
    """Split a pattern into the names of its path. Raises ValueError, with the reason, for an invalid pattern."""
    if pattern.startswith("/"):
        raise ValueError("it is absolute: use a pattern relative to the working folder")
    names = [name for name in pattern.split("/") if name not in ("", ".")]
    if ".." in names:
        raise ValueError("it leaves the working folder")
    if not names:
        raise ValueError("it is empty: use ** for all files")
    if not pattern.isprintable():
        raise ValueError("it has characters that cannot be printed")
    if pattern.endswith("/"):
        names.append("**")
    if names[-1] == "**":
        names.append("*")
    return tuple(names)


def is_literal(name: str) -> bool:
    """Return True if a name of a pattern has no wildcards."""
    return not any(character in name for character in "*?[")


def begin_steps(patterns: Iterable[tuple[str, ...]]) -> Steps:
    """Return the steps for the working folder itself."""
    return _skip_directories(set(patterns))


def take_step(steps: Steps, name: str) -> Steps:
    """Return the steps for the path with one more name."""
    next_steps: set[tuple[str, ...]] = set()
    for step in steps:
        if not step:
            continue
        if step[0] == "**" and not name.startswith("."):
            next_steps.add(step)
        elif step[0] != "**" and _matches_name(name, step[0]):
            next_steps.add(step[1:])
    return _skip_directories(next_steps)


def _matches_name(name: str, pattern: str) -> bool:
    from fnmatch import fnmatchcase  # imported late: it imports `re`, and most sandboxes collect nothing

    if is_literal(pattern):
        return name == pattern
    is_hidden = name.startswith(".") and not pattern.startswith(".")
    return not is_hidden and fnmatchcase(name, pattern)


def matches(path: str, patterns: Iterable[tuple[str, ...]]) -> bool:
    """Return True if a path matches one of the patterns."""
    steps = begin_steps(patterns)
    for name in path.split("/"):
        steps = take_step(steps, name)
    return () in steps


def list_directories(path: str) -> list[str]:
    """Return the parent directories of a path, innermost first."""
    directories: list[str] = []
    while "/" in path:
        path = path.rpartition("/")[0]
        directories.append(path)
    return directories


def find_path_problem(path: str) -> str:
    """Return the reason why a file with this path cannot be collected, or an empty string."""
    names = path.split("/")
    if any(name in ("", ".", "..") for name in names):
        return "leaves the working folder"
    if not path.isprintable():
        return "has a name with characters that cannot be printed"
    if len(names) > MAX_DEPTH + 1:
        return f"is more than {MAX_DEPTH} directories deep"
    has_long_name = any(len(name.encode("utf-8")) > MAX_NAME_BYTES for name in names)
    if has_long_name or len(path.encode("utf-8")) > MAX_PATH_BYTES:
        return f"has a path of more than {MAX_PATH_BYTES:,} bytes"
    return ""


def _skip_directories(steps: set[tuple[str, ...]]) -> Steps:
    """Add the steps without their leading `**`, because `**` may match no directory."""
    skipped = set(steps)
    for step in steps:
        while step and step[0] == "**":
            step = step[1:]
            skipped.add(step)
    return frozenset(skipped)
