"""Charts as SVG, in colours for light pages and dark ones.

A plotting library would be too large to install everywhere, and to import in every flow run, for a few charts.
"""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...sandbox.outcomes.text_escape import escape_text
from .summary import is_score

WIDTH, HEIGHT = 760, 400  # pixels of the picture
LEFT, RIGHT, TOP, BOTTOM = 84, 736, 44, 344  # edges of the plot in the picture, in pixels
LABEL_CHARACTERS = 24
LOG_SCALE_RATIO = 1000  # an axis is logarithmic if its greatest value is this many times its least, or more
LEAST_SPAN = 1e-300  # the least span of an axis: floats have no ticks within a smaller one
MAX_CELLS = 30  # rows, and also columns, of a heat map; more numeric values are grouped
MAX_BARS = 12
NAME_WIDTH = 130  # pixels of a bar's name, beside `LEFT`
MAX_BAR_HEIGHT = 34.0
MAX_AXES = 9  # axes of parallel coordinates
MAX_LINES = 400  # lines of parallel coordinates
MAX_NAMES = 30  # values of a variable that is not a number
AXIS_LABEL_CHARACTERS = 9
# Each colour is a variable in the picture's CSS. The page, or the browser, decides whether it is light or dark.
COLORS = ("ink", "grid", "paper", "dot", "line", "failure")
LIGHT = ("#1c2430", "#dfe4ea", "#fff", "#2b6cb0", "#b45309", "#c53030")
DARK = ("#dde3ea", "#39434f", "#161b22", "#6cb0f5", "#f0a742", "#ff7b72")
INK, GRID, PAPER, DOT, LINE, FAILURE = (f"var(--{name})" for name in COLORS)
# Five colours of the colour map Viridis, from dark to light. Its steps look even, also in print.
COLOR_SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
DARK_TEXT, LIGHT_TEXT = "#1c2430", "#fff"  # colours of text in a heat map, on light pages and dark ones
HALO = f' paint-order="stroke" stroke="{PAPER}" stroke-width="4"'  # keeps a label legible where lines cross it
XML_ESCAPES = {0xFFFE: "?", 0xFFFF: "?"}  # the only characters from `escape_text` that XML cannot contain

Points = Sequence[tuple[int, float]]
Pair = tuple[float, float]
Trial = tuple[Mapping[str, Any], Sequence[float], bool]
Place = Callable[[Any], float | None]


class Axis:
    """A mapping of numbers to pixels, logarithmic if the numbers span more than `LOG_SCALE_RATIO`."""

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
        """Return the pixel of a value."""
        share = (self._scale(value) - self.low) / (self.high - self.low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Return about five round values along the axis."""
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


def draw_series(
    points: Points,
    *,
    title: str,
    across: str,
    up: str,
    failed: Sequence[int] = (),
    best: str | None = None,
    pruned: Points = (),
    infeasible: Points = (),
) -> str:
    """Return a chart with a dot for each value over its number. Crosses on the axis show the numbers in `failed`.

    With `best`, "minimize" or "maximize", a line shows the best value so far. `pruned` are the last values of pruned
    trials. They are drawn as rings, as are `infeasible` trials in another colour, and the line ignores them.
    """
    everything = [*points, *pruned, *infeasible]
    numbers = [*(number for number, _ in everything), *failed]
    x, y, shapes = _draw_plot(numbers, [value for _, value in everything], title, across, up, whole=True)
    if best is not None and points:
        pick = min if best == "minimize" else max
        (first, best_so_far), *others = sorted(points)
        path = f"M{x.at(first):.1f} {y.at(best_so_far):.1f}"
        for number, value in others:
            if pick(best_so_far, value) != best_so_far:
                best_so_far = value
                path += f"H{x.at(number):.1f}V{y.at(value):.1f}"
        shapes.append(_draw_path(f"{path}H{x.at(max(numbers)):.1f}", f'fill="none" stroke="{LINE}" stroke-width="2"'))
        shapes.append(_draw_text(RIGHT, TOP - 10, "best so far", anchor="end", fill=LINE))
    radius = 4 if len(points) <= 200 else 2.2
    dot, ring = f'fill="{DOT}" fill-opacity=".75"', f'fill="none" stroke="{DOT}" stroke-opacity=".75"'
    shapes += [_draw_circle(x.at(number), y.at(value), radius, dot) for number, value in points]
    shapes += [_draw_circle(x.at(number), y.at(value), radius, ring) for number, value in pruned]
    shapes += _draw_infeasible([(x.at(number), y.at(value)) for number, value in infeasible], radius)
    cross = f'stroke="{FAILURE}" stroke-width="1.6"'
    shapes += [_draw_path(f"M{x.at(number) - 3:.1f} {BOTTOM - 6}l6 6m0 -6l-6 6", cross) for number in failed]
    return _wrap_svg(shapes)


def draw_curves(curves: Sequence[tuple[Points, bool, bool]], *, title: str, across: str, up: str) -> str:
    """Return a chart of values over steps, with a line for each trial.

    A curve is a tuple: its points, whether its trial was pruned, and whether its trial is the best. The curve of a
    pruned trial ends in a dot.
    """
    points = [point for line, _, _ in curves for point in line]
    steps, values = zip(*points, strict=True)
    x, y, shapes = _draw_plot(steps, values, title, across, up, whole=True)
    opacity = max(0.25, min(0.8, 12 / len(curves)))
    for line, is_pruned, is_best in sorted(curves, key=lambda curve: curve[2]):  # The best is drawn over the others.
        if not line:
            continue
        path = "L".join(f"{x.at(step):.1f} {y.at(value):.1f}" for step, value in line)
        style = f'stroke="{LINE}" stroke-width="2.4"' if is_best else f'stroke="{DOT}" stroke-opacity="{opacity:.2f}"'
        shapes.append(_draw_path(f"M{path}", f'fill="none" stroke-linejoin="round" {style}'))
        if is_pruned or len(line) == 1:
            step, value = line[-1]
            shapes.append(_draw_circle(x.at(step), y.at(value), 2.5, f'fill="{DOT}" fill-opacity=".6"'))
    if any(is_best for _, _, is_best in curves):
        shapes.append(_draw_text(RIGHT, TOP - 10, "the best trial", anchor="end", fill=LINE))
    if any(is_pruned for _, is_pruned, _ in curves):
        shapes.append(_draw_text(RIGHT - 100, TOP - 10, "a dot is where a trial was pruned", anchor="end", fill=DOT))
    return _wrap_svg(shapes)


def draw_pareto_front(
    points: Sequence[Pair],
    front: Sequence[Pair],
    *,
    title: str,
    across: str,
    up: str,
    infeasible: Sequence[Pair] = (),
) -> str:
    """Return a chart of two objectives: all trials as dots, and the front as larger dots that a line joins.

    Trials in `infeasible` are rings instead.
    """
    xs, ys = zip(*points, *front, *infeasible, strict=True)
    x, y, shapes = _draw_plot(xs, ys, title, across, up)
    radius, dot = 3.5 if len(points) <= 200 else 2.2, f'fill="{DOT}" fill-opacity=".5"'
    shapes += [_draw_circle(x.at(first), y.at(second), radius, dot) for first, second in points]
    shapes += _draw_infeasible([(x.at(first), y.at(second)) for first, second in infeasible], radius)
    ordered = sorted(front)
    if len(ordered) > 1:
        path = "L".join(f"{x.at(first):.1f} {y.at(second):.1f}" for first, second in ordered)
        shapes.append(_draw_path(f"M{path}", f'fill="none" stroke="{LINE}" stroke-opacity=".6"'))
    shapes += [_draw_circle(x.at(first), y.at(second), 5, f'fill="{LINE}"') for first, second in ordered]
    shapes.append(_draw_text(RIGHT, TOP - 10, "on the front", anchor="end", fill=LINE))
    return _wrap_svg(shapes)


def _draw_infeasible(places: Sequence[Pair], radius: float) -> list[str]:
    """Return a ring for each place of an infeasible trial, and a legend if there are any."""
    ring = f'fill="none" stroke="{FAILURE}" stroke-opacity=".75"'
    legend = [_draw_text(RIGHT - 100, TOP - 10, "a ring is an infeasible trial", anchor="end", fill=FAILURE)]
    return [*(_draw_circle(x, y, radius, ring) for x, y in places), *(legend if places else [])]


def draw_importances(importances: Mapping[str, float], *, title: str) -> str:
    """Return a bar chart of shares of one, the largest first, with at most `MAX_BARS` bars."""
    bars = sorted(importances.items(), key=lambda item: -item[1])[:MAX_BARS]
    left, top, most = LEFT + NAME_WIDTH, TOP + 4, max(bars[0][1], 1e-9)
    height = min(MAX_BAR_HEIGHT, (BOTTOM + 28 - top) / len(bars))
    shapes = [_draw_title(title)]
    for number, (name, share) in enumerate(bars):
        upper, width = top + number * height, (RIGHT - 60 - left) * share / most
        middle = upper + height / 2 + 4
        style = f'rx="2" fill="{DOT}"'
        shapes.append(_draw_rectangle(left, upper + height * 0.15, max(width, 1), height * 0.7, style))
        shapes.append(_draw_text(left - 8, middle, _shorten(name, 26), anchor="end"))
        shapes.append(_draw_text(left + width + 8, middle, f"{share:.2f}"))
    return _wrap_svg(shapes, top + len(bars) * height + 14)


def draw_heat_map(
    points: Sequence[tuple[Any, Any, float]], *, title: str, across: str, up: str, value: str, best: str
) -> str | None:
    """Return a heat map of values over two variables, or None if the variables have too many values to draw.

    A point is a tuple: the values of both variables, which are JSON, and the value. A cell shows the best of its
    points. `best` is "minimize" or "maximize". `value` is the title of the colour scale.
    """
    columns, rows = (_make_steps([point[place] for point in points]) for place in (0, 1))
    if columns is None or rows is None:
        return None
    (column_names, find_column), (row_names, find_row) = columns, rows
    pick = min if best == "minimize" else max
    cells: dict[tuple[int, int], float] = {}
    for first, second, number in points:
        place = find_column(first), find_row(second)
        cells[place] = pick(cells.get(place, number), number)
    least, greatest, best_value = min(cells.values()), max(cells.values()), pick(cells.values())
    scale = Axis(least, greatest, 0.0, 1.0, room=0.0)
    right = RIGHT - 86
    width, height = (right - LEFT) / len(column_names), (BOTTOM - TOP) / len(row_names)
    shapes, frames = [_draw_title(title)], list[str]()
    for (column, row), number in sorted(cells.items()):
        left, upper, share = LEFT + column * width, BOTTOM - (row + 1) * height, scale.at(number)
        style = f'fill="{_shade(share)}" stroke="{PAPER}"'
        shapes.append(_draw_rectangle(left, upper, width, height, style))
        if width >= 52 and height >= 18:
            ink = LIGHT_TEXT if share < 0.6 else DARK_TEXT
            middle = upper + height / 2 + 4
            shapes.append(_draw_text(left + width / 2, middle, f"{number:.4g}", anchor="middle", fill=ink))
        if number == best_value:
            style = f'fill="none" stroke="{LINE}" stroke-width="3"'
            frames.append(_draw_rectangle(left + 1.5, upper + 1.5, width - 3, height - 3, style))
    shapes += frames  # Frames come last, so that no other cell covers them.
    for number in _thin_out(len(column_names), int((right - LEFT) / 60)):
        shapes.append(_draw_text(LEFT + (number + 0.5) * width, BOTTOM + 18, column_names[number], anchor="middle"))
    for number in _thin_out(len(row_names), int((BOTTOM - TOP) / 18)):
        middle = BOTTOM - (number + 0.5) * height + 4
        shapes.append(_draw_text(LEFT - 8, middle, row_names[number][:11], anchor="end"))
    shapes += _draw_axis_titles((LEFT + right) / 2, across, up)
    step_height = (BOTTOM - TOP) / 40
    for step in range(40):
        style, upper = f'fill="{_shade(step / 39)}"', BOTTOM - (step + 1) * step_height
        shapes.append(_draw_rectangle(right + 20, upper, 14, step_height + 0.6, style))
    shapes.append(_draw_text(right + 38, BOTTOM, f"{least:.3g}"))
    shapes.append(_draw_text(right + 38, TOP + 10, f"{greatest:.3g}"))
    shapes.append(_draw_text(right + 20, TOP - 10, value))
    return _wrap_svg(shapes)


def _make_steps(values: Sequence[Any]) -> tuple[list[str], Callable[[Any], int]] | None:
    """Return the names of a variable's rows or columns, and a function from a value to its index. None for too many."""
    distinct = {_make_key(value): value for value in values}
    is_numeric = all(is_score(value) for value in distinct.values())
    ordered = sorted(distinct.values()) if is_numeric else list(distinct.values())
    if len(ordered) <= MAX_CELLS:
        indexes = {_make_key(value): index for index, value in enumerate(ordered)}
        return [_make_label(value) for value in ordered], lambda value: indexes[_make_key(value)]
    if not is_numeric:
        return None
    low, count = float(ordered[0]), MAX_CELLS * 2 // 3
    width = (float(ordered[-1]) - low) / count
    if not math.isfinite(width) or width <= 0:
        return None
    names = [_make_label(low + (number + 0.5) * width) for number in range(count)]
    return names, lambda value: min(count - 1, int((value - low) / width))


def _make_key(value: Any) -> Any:
    return float(value) if is_score(value) else str(value)


def _shade(share: float) -> str:
    place = min(max(share, 0.0), 1.0) * (len(COLOR_SCALE) - 1)
    low = min(int(place), len(COLOR_SCALE) - 2)
    channels = zip(COLOR_SCALE[low], COLOR_SCALE[low + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - low)):02x}" for a, b in channels)


def draw_parallel_coordinates(
    trials: Sequence[Trial], *, names: Sequence[str], objectives: Sequence[tuple[str, str]], title: str
) -> str | None:
    """Return a chart with an axis for each variable and objective, and a line for each trial.

    A trial is a tuple: its variables, its scores, and whether it is one of the best. A trial that is better by the
    first objective has a stronger line. An objective is its name, and "minimize" or "maximize". Return None if there
    are no variables, or if a variable has too many values that are not numbers.
    """
    names = names[: MAX_AXES - len(objectives)]
    if not names:
        return None
    upper, lower = TOP + 24.0, BOTTOM + 10.0
    columns = [[variables.get(name) for variables, _, _ in trials] for name in names]
    columns += [[scores[number] for _, scores, _ in trials] for number in range(len(objectives))]
    axes = [axis for column in columns if (axis := _make_axis(column, lower, upper)) is not None]
    if len(axes) < len(columns):
        return None
    titles = [*names, *(name for name, _ in objectives)]
    gap = (RIGHT - LEFT - 40) / (len(titles) - 1)
    across = [LEFT + number * gap for number in range(len(titles))]
    shapes = [_draw_text(LEFT - 60, TOP - 22, title, size=15, bold=True)]
    shapes += _draw_trials(trials, names, [place for place, _ in axes], across, objectives[0][1])
    for x, text, (_, labels) in zip(across, titles, axes, strict=True):
        shapes.append(_draw_path(f"M{x:.1f} {upper}V{lower}", f'stroke="{INK}"'))
        shapes.append(_draw_text(x, lower + 24, _shorten(text, 14), anchor="middle", bold=True))
        for y, label in labels:
            shapes.append(_draw_path(f"M{x - 3:.1f} {y:.1f}h6", f'stroke="{INK}"'))
            shapes.append(_draw_text(x - 6, y + 4, label[:AXIS_LABEL_CHARACTERS], anchor="end", size=11, more=HALO))
    return _wrap_svg(shapes)


def _draw_trials(
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
        shapes.append(_draw_path(path, f'fill="none" {style}'))
    return shapes


def _make_axis(values: Sequence[Any], lower: float, upper: float) -> tuple[Place, list[tuple[float, str]]] | None:
    """Return a function that finds a value's pixel, and the labels with their pixels. None for too many names."""
    present = [value for value in values if value is not None]
    if present and all(map(is_score, present)):
        axis = Axis(min(present), max(present), lower, upper, room=0.02)
        return axis.at, [(axis.at(tick), f"{tick:.4g}") for tick in axis.ticks()]
    names = list(dict.fromkeys(map(_make_label, present)))
    if len(names) > MAX_NAMES:
        return None
    step = (lower - upper) / max(1, len(names))
    pixels = {name: lower - (number + 0.5) * step for number, name in enumerate(names)}
    shown = [names[number] for number in _thin_out(len(names), 12)]
    return lambda value: pixels.get(_make_label(value)), [(pixels[name], name) for name in shown]


def _make_label(value: Any) -> str:
    return _shorten(f"{value:.4g}" if is_score(value) else str(value), LABEL_CHARACTERS)


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _thin_out(count: int, most: int) -> range:
    """Return at most `most` evenly spaced numbers below `count`."""
    return range(0, count, max(1, math.ceil(count / max(1, most))))


def _draw_plot(
    xs: Sequence[float], ys: Sequence[float], title: str, across: str, up: str, *, whole: bool = False
) -> tuple[Axis, Axis, list[str]]:
    """Return both axes for these values, and the title, the axes' titles and ticks, and the grid."""
    x = Axis(min(xs), max(xs), LEFT + 12, RIGHT - 12, whole=whole)
    y = Axis(min(ys), max(ys), BOTTOM - 10, TOP + 10)
    shapes = [_draw_title(title)]
    for tick in y.ticks():
        shapes.append(_draw_path(f"M{LEFT} {y.at(tick):.1f}H{RIGHT}", f'stroke="{GRID}"'))
        shapes.append(_draw_text(LEFT - 8, y.at(tick) + 4, f"{tick:.4g}", anchor="end"))
    form = ".0f" if whole else ".4g"
    shapes += [_draw_text(x.at(tick), BOTTOM + 18, f"{tick:{form}}", anchor="middle") for tick in x.ticks()]
    shapes.append(_draw_path(f"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}", f'fill="none" stroke="{INK}"'))
    return x, y, shapes + _draw_axis_titles((LEFT + RIGHT) / 2, across, up)


def _draw_axis_titles(middle: float, across: str, up: str) -> list[str]:
    rotation = f' transform="rotate(-90 16 {HEIGHT / 2})"'
    return [
        _draw_text(middle, HEIGHT - 12, across, anchor="middle"),
        _draw_text(16, HEIGHT / 2, up, anchor="middle", more=rotation),
    ]


def _draw_title(title: str) -> str:
    return _draw_text(LEFT, TOP - 20, title, size=15, bold=True)


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
    """Return a text on one line, of at most 80 characters, with `more` attributes."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"{weight}{more}>'
        f"{html.escape(escape_text(_shorten(text, 80)).translate(XML_ESCAPES))}</text>"
    )


def _draw_path(path: str, style: str) -> str:
    return f'<path d="{path}" {style}/>'


def _draw_circle(x: float, y: float, radius: float, style: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" {style}/>'


def _draw_rectangle(left: float, upper: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{left:.1f}" y="{upper:.1f}" width="{width:.1f}" height="{height:.1f}" {style}/>'


def _wrap_svg(shapes: list[str], height: float = HEIGHT) -> str:
    """Return the picture of these shapes."""
    light, dark = (
        "".join(f"--{name}:{color};" for name, color in zip(COLORS, colors, strict=True)) for colors in (LIGHT, DARK)
    )
    style = f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif"><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="{PAPER}"/>{"".join(shapes)}</svg>'
    )
