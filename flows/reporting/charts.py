"""The charts of a report: the best so far, reported values, and the variables' effect on the objective."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from .best_trials import is_score
from .columns import OUTPUTS, VARIABLES
from .summary import RunSummary
from .svg import BOTTOM, DOT, FAILURE, LEFT, LINE, PAPER, RIGHT, TOP, Axis, Drawing, Plot, shorten

Chart = tuple[str, str]  # the title, and the picture as SVG
MAX_CHART_VALUE = 1e200  # the greatest absolute value in a chart: axes have no room beyond it
MAX_CELLS = 30  # rows, and also columns, of a heat map
MAX_VARIABLES = 9  # variables that have a chart
MAX_NAMES = 30  # values of a variable that is not a number
LABEL_CHARACTERS = 24
DOTS, RINGS = f'fill="{DOT}" fill-opacity=".75"', f'fill="none" stroke="{DOT}" stroke-opacity=".75"'
INFEASIBLE_RINGS = f'fill="none" stroke="{FAILURE}" stroke-opacity=".75"'
BEST_LINE = f'stroke="{LINE}" stroke-width="2.4"'


def build_charts(summary: RunSummary) -> list[Chart]:
    """Return the charts of a run. They show its objectives, or the seconds of executions if it has no objectives."""
    points, spec = summary.points, summary.spec
    if len(points) < 2 or not all(abs(value) <= MAX_CHART_VALUE for point in points for value in point.values):
        return []
    if not spec.objectives:
        return [_draw_history(summary)]
    if len(spec.objectives) > 1:
        return [_draw_front(summary, number) for number in range(1, len(spec.objectives))]
    names = list(dict.fromkeys(name for point in points for name in point.variables))
    names = [name for name in names if len({repr(point.variables.get(name))[:200] for point in points}) > 1]
    variable_charts = _draw_heat_map(summary, names)
    if not variable_charts:
        variable_charts = [chart for name in names[:MAX_VARIABLES] for chart in _draw_variable(summary, name)]
    return [_draw_history(summary), *variable_charts, *_draw_curves(summary)]


def _draw_history(summary: RunSummary) -> Chart:
    """Draw a dot for each value over its number, rings for other trials, crosses for failures, and the best so far."""
    spec = summary.spec
    value_name = spec.objective or "seconds"
    title = f"{value_name} over {spec.noun}s"
    points = sorted((point.index, point.value) for point in summary.points if point.is_feasible)
    infeasible = [(point.index, point.value) for point in summary.points if not point.is_feasible]
    pruned = [(point.index, point.value) for point in summary.pruned_points if abs(point.value) <= MAX_CHART_VALUE]
    numbers, values = zip(*points, *pruned, *infeasible, strict=True)
    numbers = [*numbers, *summary.failed_indexes]
    plot = Plot(title, numbers, values, spec.noun, value_name, whole=True)
    if spec.objective is not None and points:
        steps = _trace_best(points, is_minimized=spec.direction == "minimize")
        plot.add_line([*steps, (max(numbers), steps[-1][1])], BEST_LINE)
        plot.add_legend("best so far", LINE)
    plot.add_dots(points, DOTS)
    plot.add_dots(pruned, RINGS)
    _add_infeasible(plot, infeasible)
    for number in summary.failed_indexes:
        plot.add_path(f"M{plot.x.at(number) - 3:.1f} {BOTTOM - 6}l6 6m0 -6l-6 6", f'stroke="{FAILURE}"')
    return title, plot.write()


def _trace_best(points: Sequence[tuple[int, float]], *, is_minimized: bool) -> list[tuple[float, float]]:
    """Return the corners of the line through the best value so far, which changes in steps."""
    corners: list[tuple[float, float]] = [points[0]]
    for number, value in points[1:]:
        best = corners[-1][1]
        is_better = value < best if is_minimized else value > best
        if is_better:
            corners += [(number, best), (number, value)]
    return corners


def _add_infeasible(plot: Plot, points: Sequence[tuple[float, float]]) -> None:
    plot.add_dots(points, INFEASIBLE_RINGS)
    if points:
        plot.add_legend("a ring is an infeasible trial", FAILURE, 100)


def _draw_curves(summary: RunSummary) -> list[Chart]:
    """Draw a line for each trial's reported values. The line of a pruned trial ends in a dot."""
    curves = [curve for curve in summary.curves if curve.points]
    points = [point for curve in curves for point in curve.points]
    if all(len(curve.points) < 2 for curve in curves) or any(abs(value) > MAX_CHART_VALUE for _, value in points):
        return []
    title = f"{summary.spec.objective} as it was reported"
    steps, values = zip(*points, strict=True)
    plot = Plot(title, steps, values, "step", "reported value", whole=True)
    best = None if summary.best.result is None else summary.best.result.meta.index
    opacity = max(0.25, min(0.8, 12 / len(curves)))  # Many lines are fainter.
    for curve in sorted(curves, key=lambda curve: curve.index == best):  # The best is drawn over the others.
        style = BEST_LINE if curve.index == best else f'stroke="{DOT}" stroke-opacity="{opacity:.2f}"'
        plot.add_line(curve.points, style)
        if curve.is_pruned or len(curve.points) == 1:
            plot.add_dots(curve.points[-1:], DOTS, 2.5)
    plot.add_legend("the best trial", LINE)
    if any(curve.is_pruned for curve in curves):
        plot.add_legend("a dot is where a trial was pruned", DOT, 100)
    return [(title, plot.write())]


def _draw_front(summary: RunSummary, number: int) -> Chart:
    """Draw trials by the first objective and objective `number`: small dots, and large ones for the Pareto front."""
    first, other = summary.spec.objectives[0], summary.spec.objectives[number]
    title = f"{first.name} and {other.name}, with the Pareto front"
    feasible = [(point.value, point.values[number]) for point in summary.points if point.is_feasible]
    infeasible = [(point.value, point.values[number]) for point in summary.points if not point.is_feasible]
    results = summary.best.results
    front = sorted((float(result.outputs[first.name]), float(result.outputs[other.name])) for result in results)
    xs, ys = zip(*feasible, *infeasible, *front, strict=True)
    plot = Plot(title, xs, ys, f"{first.name} ({first.direction})", f"{other.name} ({other.direction})")
    plot.add_dots(feasible, DOTS, 3.5)
    _add_infeasible(plot, infeasible)
    if front:
        plot.add_line(front, f'stroke="{LINE}" stroke-opacity=".6"')
    plot.add_dots(front, f'fill="{LINE}"', 5)
    plot.add_legend("on the front", LINE)
    return title, plot.write()


def _draw_heat_map(summary: RunSummary, names: list[str]) -> list[Chart]:
    """Draw a cell for each pair of values of two variables, with the best value of its trials."""
    points = [point for point in summary.points if point.is_feasible]
    if len(names) != 2 or not points:
        return []
    column_labels, column_numbers, columns = _number_values([point.variables.get(names[0]) for point in points])
    row_labels, row_numbers, rows = _number_values([point.variables.get(names[1]) for point in points])
    if max(len(column_labels), len(row_labels)) > MAX_CELLS:
        return []
    pick = min if summary.spec.direction == "minimize" else max
    cells: dict[tuple[int, int], float] = {}
    for column, row, point in zip(column_numbers, row_numbers, points, strict=True):
        cells[column, row] = pick(cells.get((column, row), point.value), point.value)
    objective = _name_objective(summary.spec.objective or "", summary)
    title = f"{objective} over {names[0]} and {names[1]}"
    drawing = Drawing(title)
    best, least, greatest = pick(cells.values()), min(cells.values()), max(cells.values())
    opacity = Axis(least, greatest, 0.05, 0.7, room=0.0)
    column_edges = _find_edges(columns, LEFT, RIGHT, log=_is_log(summary, names[0], columns))
    row_edges = _find_edges(rows, BOTTOM, TOP, log=_is_log(summary, names[1], rows))
    for (column, row), value in sorted(cells.items(), key=lambda cell: cell[1] == best):  # Frames are drawn last.
        left, upper = column_edges[column], row_edges[row + 1]
        width, height = column_edges[column + 1] - left, row_edges[row] - upper
        frame = f'stroke="{LINE}" stroke-width="3"' if value == best else f'stroke="{PAPER}"'
        fill = f'fill="{DOT}" fill-opacity="{opacity.at(value):.2f}"'
        drawing.add_rectangle(left, upper, width, height, f"{fill} {frame}")
        if width >= 52 and height >= 18:
            drawing.add_text(left + width / 2, upper + height / 2 + 4, f"{value:.4g}", "middle")
    for label, x in _place_labels(column_labels, column_edges, 60):
        drawing.add_text(x, BOTTOM + 18, label, "middle")
    for label, y in _place_labels(row_labels, row_edges, 18):
        drawing.add_text(LEFT - 8, y + 4, label[:11], "end")
    drawing.add_axis_titles((LEFT + RIGHT) / 2, *names)
    drawing.add_text(RIGHT, TOP - 6, f"pale is {least:.3g}, strong is {greatest:.3g}", "end")
    return [(title, drawing.write())]


def _is_log(summary: RunSummary, name: str, values: Sequence[float]) -> bool:
    """Return whether a variable's axis is logarithmic: as its bounds say, or without bounds over two decades."""
    space = summary.spec.space
    for alternative in space if isinstance(space, list) else [space]:
        bounds = alternative.get(name) if isinstance(alternative, dict) else None
        if isinstance(bounds, dict) and "low" in bounds:
            return bool(bounds.get("log"))
    return 0 < 100 * min(values) <= max(values)


def _find_edges(places: Sequence[float], start: float, end: float, *, log: bool) -> list[float]:
    """Return the pixels of the edges of cells, which are halfway between the places."""
    axis = Axis(places[0], places[-1], start, end, room=0.5 / max(1, len(places) - 1), log=log)
    middles = [(axis.at(place) + axis.at(next_place)) / 2 for place, next_place in itertools.pairwise(places)]
    return [start, *middles, end]


def _place_labels(labels: Sequence[str], edges: Sequence[float], room: float) -> Iterator[tuple[str, float]]:
    """Yield each label that has room, and the middle of its cell."""
    last = -math.inf
    for label, cell in zip(labels, itertools.pairwise(edges), strict=True):
        middle = sum(cell) / 2
        if abs(middle - last) >= room:
            last = middle
            yield label, middle


def _number_values(values: Sequence[Any]) -> tuple[list[str], list[int], Sequence[float]]:
    """Return the labels of the distinct values, the position of each value among them, and their places on an axis.

    Numbers are sorted. Other values keep the order of their first trials, and are in equal distances.
    """
    are_numbers = all(map(_is_number, values))
    keys = [value if are_numbers else str(value) for value in values]
    distinct: list[Any] = sorted(set(keys)) if are_numbers else list(dict.fromkeys(keys))
    positions = {key: position for position, key in enumerate(distinct)}
    labels = [shorten(f"{key:.4g}" if are_numbers else key, LABEL_CHARACTERS) for key in distinct]
    places = distinct if are_numbers else range(len(distinct))
    return labels, [positions[key] for key in keys], places


def _draw_variable(summary: RunSummary, name: str) -> list[Chart]:
    """Draw the objective over a variable: a dot for each trial that has the variable, and a large dot for the best.

    There is no chart of too many values that are not numbers.
    """
    points = [point for point in summary.points if point.is_feasible and point.variables.get(name) is not None]
    xs: Sequence[float] = [point.variables[name] for point in points]
    labels: list[str] = []
    if not all(map(_is_number, xs)):
        labels, xs, _ = _number_values(xs)
    if not points or len(labels) > MAX_NAMES:
        return []
    objective = _name_objective(summary.spec.objective or "", summary)
    title = f"{objective} over {name}"
    ys = [point.value for point in points]
    plot = Plot(title, xs, ys, name, objective, names=labels, log=_is_log(summary, name, xs))
    plot.add_dots(list(zip(xs, ys, strict=True)), DOTS)
    best = summary.best.numbers
    best_dots = [(x, point.value) for x, point in zip(xs, points, strict=True) if point.index in best]
    plot.add_dots(best_dots, f'fill="{LINE}"', 5)
    plot.add_legend("the best trial", LINE)
    return [(title, plot.write())]


def _is_number(value: Any) -> bool:
    """Return whether an axis has room for the value."""
    return is_score(value) and not isinstance(value, bool) and abs(value) <= MAX_CHART_VALUE


def _name_objective(name: str, summary: RunSummary) -> str:
    """Return the objective's name in charts that also name variables, one of which may have the same name."""
    return f"{OUTPUTS}.{name}" if name in summary.table.columns.types[VARIABLES] else name
