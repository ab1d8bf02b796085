"""A heat map of values over two variables."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..best_trial import is_score
from .svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    LINE,
    PAPER,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    draw_axis_titles,
    draw_text,
    make_label,
    thin_out,
    wrap_svg,
)

MAX_CELLS = 30  # rows and columns, at most; more values of a number are put together
# Viridis at five points, dark to light: even to the eye, and in print.
COLOR_SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
DARK_TEXT, LIGHT_TEXT = "#1c2430", "#fff"  # on a cell, whose colour is the same on light and dark pages


def draw_heat_map(
    points: Sequence[tuple[Any, Any, float]], *, title: str, across: str, up: str, value: str, best: str
) -> str | None:
    """Values over two variables, the better where trials fall together; None where there are too many to draw.

    `points` are the two variables' values, which are JSON, and the value. `best` is "minimize" or "maximize".
    """
    columns, rows = _make_steps([point[0] for point in points]), _make_steps([point[1] for point in points])
    if columns is None or rows is None:
        return None
    (column_names, find_column), (row_names, find_row) = columns, rows
    pick = min if best == "minimize" else max
    cells: dict[tuple[int, int], float] = {}
    for first, second, number in points:
        place = find_column(first), find_row(second)
        cells[place] = pick(cells.get(place, number), number)
    values = list(cells.values())
    shade = Axis(min(values), max(values), 0.0, 1.0, room=0.0)
    right = WIDTH - RIGHT - 86
    width, height = (right - LEFT) / len(column_names), (HEIGHT - BOTTOM - TOP) / len(row_names)
    shapes = [draw_text(LEFT, TOP - 20, title, size=15, bold=True)]
    top = pick(values)
    for (column, row), number in sorted(cells.items()):
        left, upper = LEFT + column * width, HEIGHT - BOTTOM - (row + 1) * height
        share = shade.at(number)
        shapes.append(
            f'<rect x="{left:.1f}" y="{upper:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{_shade(share)}" '
            f'stroke="{PAPER}"/>'
        )
        if width >= 52 and height >= 18:
            ink = LIGHT_TEXT if share < 0.6 else DARK_TEXT
            middle = upper + height / 2 + 4
            shapes.append(draw_text(left + width / 2, middle, f"{number:.4g}", anchor="middle", fill=ink))
    for (column, row), number in cells.items():
        if number == top:  # last, so that no neighbour's edge covers it
            left, upper = LEFT + column * width + 1.5, HEIGHT - BOTTOM - (row + 1) * height + 1.5
            shapes.append(
                f'<rect x="{left:.1f}" y="{upper:.1f}" width="{width - 3:.1f}" height="{height - 3:.1f}" fill="none" '
                f'stroke="{LINE}" stroke-width="3"/>'
            )
    shapes += [
        draw_text(LEFT + (number + 0.5) * width, HEIGHT - BOTTOM + 18, column_names[number], anchor="middle")
        for number in thin_out(len(column_names), int((right - LEFT) / 60))
    ]
    shapes += [
        draw_text(LEFT - 8, HEIGHT - BOTTOM - (number + 0.5) * height + 4, row_names[number][:11], anchor="end")
        for number in thin_out(len(row_names), int((HEIGHT - BOTTOM - TOP) / 18))
    ]
    shapes += draw_axis_titles((LEFT + right) / 2, across, up)
    for step in range(40):
        upper = HEIGHT - BOTTOM - (step + 1) * (HEIGHT - BOTTOM - TOP) / 40
        shapes.append(
            f'<rect x="{right + 20}" y="{upper:.1f}" width="14" height="{(HEIGHT - BOTTOM - TOP) / 40 + 0.6:.1f}" '
            f'fill="{_shade(step / 39)}"/>'
        )
    shapes.append(draw_text(right + 38, HEIGHT - BOTTOM, f"{min(values):.3g}"))
    shapes.append(draw_text(right + 38, TOP + 10, f"{max(values):.3g}"))
    shapes.append(draw_text(right + 20, TOP - 10, value))
    return wrap_svg(shapes)


def _make_steps(values: Sequence[Any]) -> tuple[list[str], Callable[[Any], int]] | None:
    """The names of the rows or columns for these values of a variable, and what finds a value's; None for too many."""
    distinct = {_make_key(value): value for value in values}
    numeric = all(is_score(value) for value in distinct.values())
    ordered = sorted(distinct.values()) if numeric else list(distinct.values())
    if len(ordered) <= MAX_CELLS:
        indexes = {_make_key(value): index for index, value in enumerate(ordered)}
        return [make_label(value) for value in ordered], lambda value: indexes[_make_key(value)]
    if not numeric:
        return None
    low, count = float(ordered[0]), MAX_CELLS * 2 // 3
    width = (float(ordered[-1]) - low) / count
    if not math.isfinite(width) or width <= 0:
        return None
    names = [make_label(low + (number + 0.5) * width) for number in range(count)]
    return names, lambda value: min(count - 1, int((value - low) / width))


def _make_key(value: Any) -> Any:
    return float(value) if is_score(value) else str(value)


def _shade(share: float) -> str:
    place = min(max(share, 0.0), 1.0) * (len(COLOR_SCALE) - 1)
    low = min(int(place), len(COLOR_SCALE) - 2)
    parts = zip(COLOR_SCALE[low], COLOR_SCALE[low + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - low)):02x}" for a, b in parts)
