"""What somebody finds who joins: files of a size to read, rooms to look through, and imports without circles."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("cli", "deployments", "flows", "tasks", "blocks", "sandbox")
MAX_LINES = 500
MAX_FILES = 14
LONG_FILE = "Over 500 lines because"  # so a file of more begins its reason, in its docstring


def find_modules() -> dict[str, Path]:
    """The package's modules by their dotted names."""
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return {
        ".".join(part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"): path
        for path in paths
    }


MODULES = find_modules()


def list_imports(module: str, source: str, *, is_package: bool) -> Iterator[str]:
    """The package's modules that a module imports, anywhere in it and also for types alone."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        parts = module.split(".")
        base = parts[: len(parts) - node.level + is_package]
        target = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            full = f"{target}.{alias.name}" if target else alias.name
            if full in MODULES:
                yield full
            elif target in MODULES:
                yield target


def find_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """A circle for each module that is reached from itself, as the way round."""
    circles: list[list[str]] = []
    for start in graph:
        ways = [[start, following] for following in sorted(graph[start])]
        seen: set[str] = set()
        while ways:
            way = ways.pop()
            if way[-1] == start:
                circles.append(way)
                break
            if way[-1] not in seen:
                seen.add(way[-1])
                ways += [[*way, following] for following in sorted(graph.get(way[-1], ()))]
    return circles


def test_no_two_files_import_each_other_not_even_for_types():
    graph = {
        module: set(list_imports(module, path.read_text(), is_package=path.name == "__init__.py")) - {module}
        for module, path in MODULES.items()
    }
    assert sum(map(len, graph.values())) > 200
    assert find_circles(graph) == []


def test_a_circle_is_found_wherever_it_is_hidden():
    typing_only = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .protocol import x"
    assert list(list_imports("sandbox.result", typing_only, is_package=False)) == ["sandbox.protocol"]
    late = "def f():\n    from ..blocks import registry"
    assert list(list_imports("cli.main", late, is_package=False)) == ["blocks.registry"]
    assert find_circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})[0] == ["a", "b", "c", "a"]


@pytest.mark.parametrize("room", [*ROOMS, "tests", "benchmarks", "examples"])
def test_a_file_is_short_or_says_why_it_is_not(room: str):
    for path in sorted((ROOT / room).rglob("*.py")):
        text = path.read_text()
        assert text.count("\n") <= MAX_LINES or LONG_FILE in (ast.get_docstring(ast.parse(text)) or ""), path


@pytest.mark.parametrize("room", [*ROOMS, "tests", "benchmarks", "examples"])
def test_a_room_has_no_more_files_than_one_can_look_through(room: str):
    folders = [ROOT / room, *(path for path in (ROOT / room).rglob("*") if path.is_dir())]
    crowded = {folder.name: len(files) for folder in folders if len(files := list(folder.glob("*.py"))) > MAX_FILES}
    assert crowded == {}
