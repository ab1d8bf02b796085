"""The rows of `start`: points that the search tries first, and known results, from which only the sampler learns."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ...sandbox.errors import ConfigurationError
from ...sandbox.meta import Meta
from ...sandbox.requests.json_text import RepeatedKeyError
from ...sandbox.result import Outcome, Result
from ...tasks.ledger.run_record import Aggregate, ReportSpec
from ...tasks.repeats import REPEAT
from ..inputs.cells import read_word
from ..inputs.readers import open_input_file
from ..reporting.columns import OUTPUTS, VARIABLES
from ..reporting.groups import aggregate_group, read_number
from .plan import Point
from .space import Choices, Parameter, SearchSpace


@dataclass(frozen=True, slots=True)
class StartRows:
    """The points to try first and the known results. `left_out` counts the rows without a number for an objective."""

    points: tuple[Point, ...] = ()
    known: tuple[Outcome, ...] = ()
    left_out: int = 0

    def describe(self) -> list[str]:
        """Return lines about the rows that have an objective."""
        lines: list[str] = []
        if self.known:
            lines.append(f"start: {len(self.known):,} known results, which are not run")
        if self.left_out:
            lines.append(f"start: {self.left_out:,} rows without a number for the objective are left out")
        return lines


def read_start(start: Any, space: SearchSpace, spec: ReportSpec, aggregate: Aggregate) -> StartRows:
    """Return the rows of `start`, which is a list or the path of a file.

    A row that has all objectives is a known result. It may come from an export: other columns than variables,
    objectives and constraints are ignored, and the repeats of a point are combined by `aggregate`.

    Raises:
        ConfigurationError: There are no rows, or a point is not in the space.
    """
    rows: Any = start
    if isinstance(start, str):
        choices = [name for item in space.alternatives for name in item if isinstance(item[name], Choices)]
        texts = [*choices, *(f"{VARIABLES}.{name}" for name in choices)]
        rows = open_input_file(start, check=lambda _names, _where: None, texts=texts)
    if not len(rows):
        raise ConfigurationError(f"{start if isinstance(start, str) else '`start`'} has no rows: give at least one row")
    points: list[Point] = []
    results: dict[str, list[Outcome]] = {}
    left_out = 0
    for number, row in enumerate(rows, 1):
        fields = [_find_column(row, OUTPUTS, item.name, space) for item in spec.objectives]
        is_known = bool(fields) and all(field in row for field in fields)
        point = _find_known_point(row, space) if is_known else _find_start_point(row, space)
        if point is None:
            described = "; ".join(space.describe())
            raise ConfigurationError(f"`start`: point {number} is {dict(row)}, which is not in the space ({described})")
        outputs = _read_outputs(row, space, spec)
        if not is_known:
            points.append(point)
        elif outputs is None:
            left_out += 1
        else:
            has_repeats = row.get(REPEAT) is not None
            key = json.dumps(point.variables, sort_keys=True) if has_repeats else str(number)
            is_pruned = row.get("pruned") is True and "pruned" not in space.names
            result = Result(outputs, Meta(variables=point.variables, pruned=is_pruned))
            results.setdefault(key, []).append(result)
    spec = replace(spec, aggregate=aggregate)
    known = tuple(group[0] if len(group) == 1 else aggregate_group(group, 0, spec) for group in results.values())
    return StartRows(tuple(points), known, left_out)


def _find_column(row: Mapping[str, Any], source: str, name: str, space: SearchSpace) -> str:
    """Return the column of a variable or a field. An export gives it a prefix if its own name is taken."""
    prefixed = f"{source}.{name}"
    is_taken = source == OUTPUTS and name in space.names
    return prefixed if prefixed in row or is_taken else name


def _find_start_point(row: Mapping[str, Any], space: SearchSpace) -> Point | None:
    """Return a point to try first, or None if it has another name or value than the space."""
    variables: dict[str, Any] = {}
    for name, cell in row.items():
        variables[name] = _read_cell(cell, [item[name] for item in space.alternatives if name in item])
    alternative = space.find_alternative(variables, may_lack_variables=True)
    return None if alternative is None else Point(variables, alternative)


def _find_known_point(row: Mapping[str, Any], space: SearchSpace) -> Point | None:
    """Return the point of a known result, which has all variables of an alternative and none of the others."""
    cells = {name: row.get(_find_column(row, VARIABLES, name, space)) for name in space.names}
    for number, alternative in enumerate(space.alternatives):
        variables = {name: _read_cell(cells[name], [parameter]) for name, parameter in alternative.items()}
        has_others = any(cells[name] is not None for name in cells if name not in alternative)
        if not has_others and all(alternative[name].contains(value) for name, value in variables.items()):
            return Point(variables, number)
    return None


def _read_cell(cell: Any, parameters: Sequence[Parameter]) -> Any:
    """Return the value of a variable that a file's cell means, or the cell itself if the variable has no such value.

    An export writes texts as they are, with an apostrophe before a formula, and other values as JSON.
    """
    candidates = [cell]
    if cell is None:
        candidates.append("")
    elif isinstance(cell, str):
        candidates += [_read_json(cell), cell.removeprefix("'")]
    for candidate in candidates:
        if any(parameter.contains(candidate) for parameter in parameters):
            return candidate
    return cell


def _read_json(text: str) -> Any:
    with suppress(RepeatedKeyError):
        return read_word(text)
    return text


def _read_outputs(row: Mapping[str, Any], space: SearchSpace, spec: ReportSpec) -> dict[str, Any] | None:
    """Return the numbers of the objectives and constraints, or None if one is missing, NaN or not a number."""
    outputs: dict[str, Any] = {}
    for name in [*(item.name for item in spec.objectives), *spec.constraints]:
        cell = row.get(_find_column(row, OUTPUTS, name, space))
        number = read_number(_read_json(cell) if isinstance(cell, str) else cell)
        if number is None or number != number:
            return None
        outputs[name] = number
    return outputs
