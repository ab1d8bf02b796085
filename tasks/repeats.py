"""Repeats: the numbers of a run's executions, if each input runs several times."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ..sandbox.errors import ConfigurationError
from ..sandbox.model_reply import parse_python, read_program
from ..sandbox.requests.function_code import find_parameters

REPEAT = "repeat"  # the variable with the number of the repeat

Item = tuple[str, dict[str, Any]]  # code and its variables


class Place(NamedTuple):
    """The number of an execution's group (its input, point or chunk), and of its repeat, both from 0."""

    group: int | None = None
    repeat: int | None = None


NO_PLACE = Place()


@dataclass(frozen=True, slots=True)
class Repeats:
    """The repeats of a run: each of its `groups` runs `count` times. Executions of a group have successive indices."""

    count: int
    groups: int

    @property
    def total(self) -> int:
        """The number of executions that belong to a group. A chunked job's reduction belongs to none."""
        return self.count * self.groups


def locate_execution(repeats: Repeats | None, index: int) -> Place:
    """Return the group and the repeat of an execution. Both are None if it belongs to no group."""
    if repeats is None or index >= repeats.total:
        return NO_PLACE
    return Place(index // repeats.count, index % repeats.count)


@dataclass(frozen=True, slots=True)
class RepeatedItems:
    """The items, each `count` times in a row. Code that reads the variable `repeat` gets the number of the repeat.

    `prepare` is the code that runs in each sandbox first. If it defines the name `repeat`, code gets that value.
    """

    items: Iterable[Item]
    count: int
    prepare: str | None = None

    def __iter__(self) -> Iterator[Item]:
        for code, variables in self.items:
            needs_number = reads_repeat(code, self.prepare)
            for repeat in range(self.count):
                yield code, add_repeat(variables, repeat) if needs_number else variables


@lru_cache(maxsize=100)
def reads_repeat(code: str, prepare: str | None) -> bool:
    """Return whether code reads the variable `repeat`, which neither the code nor `prepare` defines.

    The code of a function reads its parameters. Code that Python cannot compile reads nothing.
    """
    if REPEAT not in code:
        return False
    if prepare is not None and _find_uses(prepare) & {"assigned", "declared"}:
        return False
    parameters = find_parameters(code)
    if parameters is not None:
        return REPEAT in parameters.names
    uses = _find_uses(code)
    return "read" in uses and "declared" not in uses


def _find_uses(code: str) -> set[str]:
    """Return how code uses the name `repeat`: read, assigned, or declared by a top-level import, function or class."""
    uses: set[str] = set()
    tree = parse_python(read_program(code)) if REPEAT in code else None
    if tree is None:
        return uses
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == REPEAT:
            uses.add("read" if isinstance(node.ctx, ast.Load) else "assigned")
    for statement in tree.body:
        declared_names = [getattr(statement, "name", "")]
        if isinstance(statement, ast.Import | ast.ImportFrom):
            declared_names = [(alias.asname or alias.name).split(".")[0] for alias in statement.names]
        if REPEAT in declared_names:
            uses.add("declared")
    return uses


def add_repeat(variables: dict[str, Any], repeat: int) -> dict[str, Any]:
    """Return the variables with the number of the repeat. Raises ConfigurationError if they already have one."""
    refuse_own_repeat(variables)
    return {**variables, REPEAT: repeat}


def refuse_own_repeat(names: Iterable[str]) -> None:
    """Raise ConfigurationError if `repeat` is among the names of an input's variables."""
    if REPEAT in names:
        raise ConfigurationError(
            f"the inputs have a variable {REPEAT!r}, which repeats= sets to the number of the repeat: rename it"
        )
