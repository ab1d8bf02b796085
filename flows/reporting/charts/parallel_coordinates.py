"""A chart of trials over all their variables and objectives: an axis for each, a line for each trial."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..best_trial import is_score
from .svg import (
    BOTTOM,
    DOT,
    HEIGHT,
    INK,
    LEFT,
    LINE,
    PAPER,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    draw_text,
    make_label,
    thin_out,
    wrap_svg,
)

MAX_AXES = 9
MAX_LINES = 400
MAX_NAMES = 30  # of a variable that is no number
LABEL = 9  # characters at an axis that others stand close to
HALO = f' paint-order="stroke" stroke="{PAPER}" stroke-width="4"'  # for a label that lines go through

Trial = tuple[Mapping[str, Any], Sequence[float], bool]
Place = Callable[[Any], float | None]


def draw_parallel_coordinates(
    trials: Sequence[Trial], *, names: Sequence[str], objectives: Sequence[tuple[str, str]], title: str
) -> str | None:
    """The trials as lines, the better the stronger, and the best in front; None where an axis would have too much.

    A trial is its variables, its scores, and whether it is one of the best; an objective is its name, and "minimize" or
    "maximize". A trial that has not got a variable has no line there.
    """
    names = names[: MAX_AXES - len(objectives)]
    if not names:
        return None
    upper, lower = TOP + 24.0, HEIGHT - BOTTOM + 10.0
    places: list[Place] = []
    labels: list[list[tuple[float, str]]] = []
    for name in names:
        axis = _make_axis([variables.get(name) for variables, _, _ in trials], lower, upper)
        if axis is None:
            return None
        places.append(axis[0])
        labels.append(axis[1])
    for number in range(len(objectives)):
        axis = _make_axis([scores[number] for _, scores, _ in trials], lower, upper)
        assert axis is not None
        places.append(axis[0])
        labels.append(axis[1])
    titles = [*names, *(name for name, _ in objectives)]
    gap = (WIDTH - LEFT - RIGHT - 40) / (len(titles) - 1)
    across = [LEFT + number * gap for number in range(len(titles))]
    shapes = [draw_text(LEFT - 60, TOP - 22, title, size=15, bold=True)]
    shapes += _draw_lines(trials, names, places, across, objectives[0][1])
    for x, text, marks in zip(across, titles, labels, strict=True):
        shapes.append(f'<path d="M{x:.1f} {upper}V{lower}" stroke="{INK}"/>')
        short = text if len(text) <= 14 else f"{text[:11]}..."
        shapes.append(draw_text(x, lower + 24, short, anchor="middle", bold=True))
        for y, label in marks:
            shapes.append(f'<path d="M{x - 3:.1f} {y:.1f}h6" stroke="{INK}"/>')
            shapes.append(draw_text(x - 6, y + 4, label[:LABEL], anchor="end", size=11, more=HALO))
    return wrap_svg(shapes)


def _draw_lines(
    trials: Sequence[Trial], names: Sequence[str], places: Sequence[Place], across: Sequence[float], direction: str
) -> list[str]:
    sign = 1 if direction == "minimize" else -1
    worst_first = sorted(trials, key=lambda trial: (trial[2], -sign * trial[1][0]))[-MAX_LINES:]
    shapes: list[str] = []
    for rank, (variables, scores, is_best) in enumerate(worst_first, 1):
        values = [*(variables.get(name) for name in names), *scores]
        path, is_drawing = "", False
        for x, place, value in zip(across, places, values, strict=True):
            y = None if value is None else place(value)
            if y is not None:
                path += f"{'L' if is_drawing else 'M'}{x:.1f} {y:.1f}"
            is_drawing = y is not None
        strength = 0.06 + 0.6 * (rank / len(worst_first)) ** 2
        style = f'stroke="{LINE}" stroke-width="2.4"' if is_best else f'stroke="{DOT}" stroke-opacity="{strength:.2f}"'
        shapes.append(f'<path d="{path}" fill="none" {style}/>')
    return shapes


def _make_axis(values: Sequence[Any], lower: float, upper: float) -> tuple[Place, list[tuple[float, str]]] | None:
    """What finds a value's pixel, and the pixels of the labels; None where there are too many names."""
    given = [value for value in values if value is not None]
    if given and all(map(is_score, given)):
        axis = Axis(min(given), max(given), lower, upper, room=0.02)
        return axis.at, [(axis.at(tick), f"{tick:.4g}") for tick in axis.ticks()]
    names = list(dict.fromkeys(map(make_label, given)))
    if len(names) > MAX_NAMES:
        return None
    step = (lower - upper) / max(1, len(names))
    pixels = {name: lower - (number + 0.5) * step for number, name in enumerate(names)}
    shown = [names[number] for number in thin_out(len(names), 12)]
    return lambda value: pixels.get(make_label(value)), [(pixels[name], name) for name in shown]
