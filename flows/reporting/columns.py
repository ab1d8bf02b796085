"""The columns of any table of outcomes: one for each variable, and one for each field that code has submitted."""

from collections.abc import Collection, Iterable
from typing import Any

from ...sandbox.result import Outcome, Result

VARIABLES, OUTPUTS = "variables", "outputs"  # where a column's values come from


def name_columns(
    variables: Iterable[str], fields: Iterable[str], taken: Collection[str] = ()
) -> dict[str, tuple[str, str]]:
    """Return the source and the name of each column's values by the column's name, the variables first.

    A name that another column has gets its source before it: a field that is called as the variable `x` has the column
    `outputs.x`. `taken` are the names of columns beside these.
    """
    places = [(source, name) for source, names in ((VARIABLES, variables), (OUTPUTS, fields)) for name in names]
    columns: dict[tuple[str, str], str] = {}
    used = set(taken)
    # The shortest come first, so that the field `x` gets `outputs.x` even where code has submitted that name before it.
    for source, name in sorted(places, key=lambda place: (place[0] == OUTPUTS, len(place[1]))):
        column = name
        while column in used:
            column = f"{source}.{column}"
        columns[source, name] = column
        used.add(column)
    return {columns[place]: place for place in places}


def list_new_fields(outcome: Outcome) -> list[str]:
    """Return the names of the submitted fields, without those that repeat the variable of that name.

    Code often submits its variables together with what it made of them; a table shows these values once.
    """
    variables, fields = (get_values(outcome, source) for source in (VARIABLES, OUTPUTS))
    return [name for name, value in fields.items() if name not in variables or not _are_same(variables[name], value)]


def _are_same(variable: Any, field: Any) -> bool:
    return type(variable) is type(field) and (variable == field or (variable != variable and field != field))


def get_values(outcome: Outcome, source: str) -> dict[str, Any]:
    """Return the variables of an execution, or the fields that it submitted."""
    if source == VARIABLES:
        return outcome.meta.variables
    return outcome.outputs if isinstance(outcome, Result) else {}
