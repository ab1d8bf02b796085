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
    """The items, each `count` times in a row. Code with the name `repeat` gets the number of the repeat."""

    items: Iterable[Item]
    count: int

    def __iter__(self) -> Iterator[Item]:
        for code, variables in self.items:
            needs_number = reads_repeat(code)
            for repeat in range(self.count):
                yield code, add_repeat(variables, repeat) if needs_number else variables


@lru_cache(maxsize=100)
def reads_repeat(code: str) -> bool:
    """Return whether code has the name `repeat`. The code of a function has its parameters."""
    parameters = find_parameters(code)
    if parameters is not None:
        return REPEAT in parameters.names
    tree = parse_python(read_program(code)) if REPEAT in code else None
    return tree is not None and any(isinstance(node, ast.Name) and node.id == REPEAT for node in ast.walk(tree))


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
