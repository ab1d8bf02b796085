"""Two charts as SVG: values in their order, and a heat map over two variables.

A writer of our own, because a plotting library and what it stands on is much to install everywhere, and to import in
every flow run, for two charts.
"""

import html
import math
from collections.abc import Callable, Sequence
from typing import Any

from ...sandbox.outcomes.text_escape import escape_text
from .best_trial import is_score

WIDTH, HEIGHT = 760, 400  # pixels of the picture
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 44, 56  # pixels around the plot
MAX_CELLS = 30  # rows and columns of a heat map, at most; more values of a number are put together
LABEL_CHARACTERS = 24
LOG_SCALE_RATIO = 1000  # the greatest over the least value from which on an axis is logarithmic
LEAST_SPAN = 1e-300  # of values that differ on an axis: below it there are no numbers for ticks between them
INK, GRID, DOT, LINE, FAILURE = "#1c2430", "#dfe4ea", "#2b6cb0", "#d97706", "#c53030"
XML_ESCAPES = {0xFFFE: "?", 0xFFFF: "?"}  # the only letters that XML cannot hold and `escape_text` lets through
# Viridis at five points, dark to light: even to the eye, and in print.
COLOR_SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


def draw_series(
    points: Sequence[tuple[int, float]],
    *,
    title: str,
    across: str,
    up: str,
    failed: Sequence[int] = (),
    best: str | None = None,
) -> str:
    """Values by their numbers, as dots. `failed` are numbers without a value, marked below the axis.

    With `best`, "minimize" or "maximize", a line follows the best so far.
    """
    numbers = [number for number, _ in points] + list(failed)
    values = [value for _, value in points]
    x = _Axis(min(numbers, default=0), max(numbers, default=1), LEFT + 12, WIDTH - RIGHT - 12, whole=True)
    y = _Axis(min(values, default=0.0), max(values, default=1.0), HEIGHT - BOTTOM - 10, TOP + 10)
    shapes = _draw_frame(title, across, up, x, y)
    if best is not None and points:
        pick = min if best == "minimize" else max
        (first, best_so_far), *others = sorted(points)
        path = f"M{x.at(first):.1f} {y.at(best_so_far):.1f}"
        for number, value in others:
            if pick(best_so_far, value) != best_so_far:
                best_so_far = value
                path += f"H{x.at(number):.1f}V{y.at(value):.1f}"
        path += f"H{x.at(max(numbers)):.1f}"
        shapes.append(f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="2"/>')
        shapes.append(_draw_text(WIDTH - RIGHT, TOP - 10, "best so far", anchor="end", fill=LINE))
    radius = 4 if len(points) <= 200 else 2.2
    for number, value in points:
        shapes.append(
            f'<circle cx="{x.at(number):.1f}" cy="{y.at(value):.1f}" r="{radius}" fill="{DOT}" fill-opacity=".75"/>'
        )
    for number in failed:
        at, low = x.at(number), HEIGHT - BOTTOM
        shapes.append(f'<path d="M{at - 3:.1f} {low - 6}l6 6m0 -6l-6 6" stroke="{FAILURE}" stroke-width="1.6"/>')
    return _wrap_svg(shapes)


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
    shade = _Axis(min(values), max(values), 0.0, 1.0, room=0.0)
    right = WIDTH - RIGHT - 86
    width, height = (right - LEFT) / len(column_names), (HEIGHT - BOTTOM - TOP) / len(row_names)
    shapes = [_draw_text(LEFT, TOP - 20, title, size=15, bold=True)]
    top = pick(values)
    for (column, row), number in sorted(cells.items()):
        left, upper = LEFT + column * width, HEIGHT - BOTTOM - (row + 1) * height
        share = shade.at(number)
        shapes.append(
            f'<rect x="{left:.1f}" y="{upper:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{_shade(share)}" '
            f'stroke="#fff"/>'
        )
        if width >= 52 and height >= 18:
            ink = "#fff" if share < 0.6 else INK
            middle = upper + height / 2 + 4
            shapes.append(_draw_text(left + width / 2, middle, f"{number:.4g}", anchor="middle", fill=ink))
    for (column, row), number in cells.items():
        if number == top:  # last, so that no neighbour's edge covers it
            left, upper = LEFT + column * width + 1.5, HEIGHT - BOTTOM - (row + 1) * height + 1.5
            shapes.append(
                f'<rect x="{left:.1f}" y="{upper:.1f}" width="{width - 3:.1f}" height="{height - 3:.1f}" fill="none" '
                f'stroke="{LINE}" stroke-width="3"/>'
            )
    shapes += [
        _draw_text(LEFT + (number + 0.5) * width, HEIGHT - BOTTOM + 18, column_names[number], anchor="middle")
        for number in _thin_out(len(column_names), int((right - LEFT) / 60))
    ]
    shapes += [
        _draw_text(LEFT - 8, HEIGHT - BOTTOM - (number + 0.5) * height + 4, row_names[number][:11], anchor="end")
        for number in _thin_out(len(row_names), int((HEIGHT - BOTTOM - TOP) / 18))
    ]
    shapes += _draw_axis_titles((LEFT + right) / 2, across, up)
    for step in range(40):
        upper = HEIGHT - BOTTOM - (step + 1) * (HEIGHT - BOTTOM - TOP) / 40
        shapes.append(
            f'<rect x="{right + 20}" y="{upper:.1f}" width="14" height="{(HEIGHT - BOTTOM - TOP) / 40 + 0.6:.1f}" '
            f'fill="{_shade(step / 39)}"/>'
        )
    shapes.append(_draw_text(right + 38, HEIGHT - BOTTOM, f"{min(values):.3g}"))
    shapes.append(_draw_text(right + 38, TOP + 10, f"{max(values):.3g}"))
    shapes.append(_draw_text(right + 20, TOP - 10, value))
    return _wrap_svg(shapes)


class _Axis:
    """Numbers onto pixels, by their logarithm where they span more than `LOG_SCALE_RATIO`."""

    def __init__(
        self, low: float, high: float, start: float, end: float, *, whole: bool = False, room: float = 0.04
    ) -> None:
        self.whole = whole
        self.log = not whole and low > 1e-300 and high / low >= LOG_SCALE_RATIO
        low, high = self._scale(low), self._scale(high)
        spare = 0.0 if whole else (high - low) * room
        if high - low <= max(abs(high) * 1e-12, LEAST_SPAN):
            spare = 0.5 if whole else max(abs(high), 1.0) * 0.05
        self.low, self.high, self._start, self._end = low - spare, high + spare, start, end

    def _scale(self, value: float) -> float:
        return math.log10(value) if self.log else float(value)

    def at(self, value: float) -> float:
        """The pixel at which the value is."""
        share = (self._scale(value) - self.low) / (self.high - self.low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Round values along the axis, some five of them."""
        if self.log:
            first, last = math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9)
            every = max(1, (last - first) // 6 + 1)
            return [10.0**power for power in range(first, last + 1, every)]
        span = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(span))
        step = next((unit * factor for factor in (1, 2, 5, 10) if unit * factor >= span), span)
        step = max(1.0, step) if self.whole else step
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)][:12]


def _make_steps(values: Sequence[Any]) -> tuple[list[str], Callable[[Any], int]] | None:
    """The names of the rows or columns for these values of a variable, and what finds a value's; None for too many."""
    distinct = {_make_key(value): value for value in values}
    numeric = all(is_score(value) for value in distinct.values())
    ordered = sorted(distinct.values()) if numeric else list(distinct.values())
    if len(ordered) <= MAX_CELLS:
        indexes = {_make_key(value): index for index, value in enumerate(ordered)}
        return [_make_label(value) for value in ordered], lambda value: indexes[_make_key(value)]
    if not numeric:
        return None
    low, count = float(ordered[0]), MAX_CELLS * 2 // 3
    width = (float(ordered[-1]) - low) / count
    if not math.isfinite(width) or width <= 0:
        return None
    names = [_make_label(low + (number + 0.5) * width) for number in range(count)]
    return names, lambda value: min(count - 1, int((value - low) / width))


def _make_key(value: Any) -> Any:
    return float(value) if is_score(value) else str(value)


def _make_label(value: Any) -> str:
    text = f"{value:.4g}" if is_score(value) else str(value)
    return text if len(text) <= LABEL_CHARACTERS else text[: LABEL_CHARACTERS - 3] + "..."


def _thin_out(count: int, most: int) -> range:
    """Some of the numbers below `count`, evenly, no more than `most`."""
    return range(0, count, max(1, math.ceil(count / max(1, most))))


def _shade(share: float) -> str:
    place = min(max(share, 0.0), 1.0) * (len(COLOR_SCALE) - 1)
    low = min(int(place), len(COLOR_SCALE) - 2)
    parts = zip(COLOR_SCALE[low], COLOR_SCALE[low + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - low)):02x}" for a, b in parts)


def _draw_frame(title: str, across: str, up: str, x: _Axis, y: _Axis) -> list[str]:
    shapes = [_draw_text(LEFT, TOP - 20, title, size=15, bold=True)]
    for tick in y.ticks():
        at = y.at(tick)
        shapes.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        shapes.append(_draw_text(LEFT - 8, at + 4, f"{tick:.4g}", anchor="end"))
    low = HEIGHT - BOTTOM + 18
    shapes += [_draw_text(x.at(tick), low, f"{tick:.0f}", anchor="middle") for tick in x.ticks()]
    shapes.append(f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="{INK}"/>')
    return shapes + _draw_axis_titles((LEFT + WIDTH - RIGHT) / 2, across, up)


def _draw_axis_titles(middle: float, across: str, up: str) -> list[str]:
    turned = f' transform="rotate(-90 16 {HEIGHT / 2})"'
    return [
        _draw_text(middle, HEIGHT - 12, across, anchor="middle"),
        _draw_text(16, HEIGHT / 2, up, anchor="middle", more=turned),
    ]


def _draw_text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 12,
    bold: bool = False,
    fill: str = INK,
    more: str = "",
) -> str:
    weight = ' font-weight="600"' if bold else ""
    short = text if len(text) <= 80 else text[:77] + "..."
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"{weight}{more}>'
        f"{html.escape(escape_text(short).translate(XML_ESCAPES))}</text>"
    )


def _wrap_svg(shapes: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui, sans-serif"><rect width="100%" height="100%" fill="#fff"/>{"".join(shapes)}</svg>'
    )
