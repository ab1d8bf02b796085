"""The charts of a report: the best so far, reported values, and the variables' effect on the objective."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..search.importances import Importances
from .best_trials import is_score
from .columns import OUTPUTS, VARIABLES
from .summary import RunSummary
from .svg import BOTTOM, DOT, FAILURE, INK, LEFT, LINE, PAPER, RIGHT, TOP, Axis, Drawing, Plot, shorten

Chart = tuple[str, str]  # the title, and the picture as SVG
MAX_CHART_VALUE = 1e200  # the greatest absolute value in a chart: axes have no room beyond it
MAX_CELLS = 30  # rows, and also columns, of a heat map; more numeric values are grouped
GROUPED_CELLS = 20  # rows or columns of a heat map with grouped values
MAX_BARS = 12
MAX_AXES = 9  # axes of parallel coordinates
AXIS_TOP, AXIS_BOTTOM = TOP + 24.0, BOTTOM + 10.0  # ends of an axis of parallel coordinates, in pixels
MAX_LINES = 400  # lines of parallel coordinates
MAX_NAMES = 30  # values of a variable that is not a number
MAX_SHOWN_NAMES = 12  # names beside an axis
LABEL_CHARACTERS = 24
DOTS, RINGS = f'fill="{DOT}" fill-opacity=".75"', f'fill="none" stroke="{DOT}" stroke-opacity=".75"'
INFEASIBLE_RINGS = f'fill="none" stroke="{FAILURE}" stroke-opacity=".75"'
BEST_LINE = f'stroke="{LINE}" stroke-width="2.4"'
HALO = f' paint-order="stroke" stroke="{PAPER}" stroke-width="4"'  # keeps a label legible where lines cross it


class PlacedValues(NamedTuple):
    """An axis of parallel coordinates, with a value of each point."""

    pixels: dict[int, float]  # the pixel of each value that is not None, by its position among the values
    labels: list[tuple[float, str]]  # pixels and texts


def build_charts(summary: RunSummary, importances: Importances | None = None) -> list[Chart]:
    """Return the charts of a run. They show its objectives, or the seconds of executions if it has no objectives."""
    points, spec = summary.points, summary.spec
    if len(points) < 2 or not all(abs(value) <= MAX_CHART_VALUE for point in points for value in point.values):
        return []
    if not spec.objectives:
        return [_draw_history(summary)]
    names = list(dict.fromkeys(name for point in points for name in point.variables))
    names = [name for name in names if len({repr(point.variables.get(name))[:200] for point in points}) > 1]
    if len(spec.objectives) > 1:
        charts = [_draw_front(summary, number) for number in range(1, len(spec.objectives))]
        return [*charts, *_draw_parallel(summary, names)]
    charts = [_draw_history(summary), *_draw_heat_map(summary, names), *_draw_curves(summary)]
    if importances is not None:
        charts.append(_draw_importances(importances, spec.objective or ""))
    if len(names) > 1:
        charts += _draw_parallel(summary, names)
    return charts


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


def _draw_importances(importances: Importances, objective: str) -> Chart:
    """Draw a bar for each variable's share, the largest first."""
    title = f"importance of each variable for {objective} ({importances.method})"
    drawing, left = Drawing(title), LEFT + 130
    bars = sorted(importances.shares.items(), key=lambda item: -item[1])[:MAX_BARS]
    height = min(34.0, (BOTTOM + 24 - TOP) / len(bars))
    greatest = max(bars[0][1], 1e-9)
    for number, (name, share) in enumerate(bars):
        upper, width = TOP + 4 + number * height, (RIGHT - 60 - left) * share / greatest
        drawing.add_rectangle(left, upper + height * 0.15, max(width, 1), height * 0.7, f'fill="{DOT}"')
        drawing.add_text(left - 8, upper + height / 2 + 4, shorten(name, 26), "end")
        drawing.add_text(left + width + 8, upper + height / 2 + 4, f"{share:.2f}")
    return title, drawing.write(TOP + 18 + len(bars) * height)


def _draw_heat_map(summary: RunSummary, names: list[str]) -> list[Chart]:
    """Draw a cell for each pair of values of two variables, with the best value of its trials."""
    points = [point for point in summary.points if point.is_feasible]
    if len(names) != 2 or not points:
        return []
    columns, rows = (_group_values([point.variables.get(name) for point in points]) for name in names)
    if columns is None or rows is None:
        return []
    (column_labels, column_numbers), (row_labels, row_numbers) = columns, rows
    pick = min if summary.spec.direction == "minimize" else max
    cells: dict[tuple[int, int], float] = {}
    for column, row, point in zip(column_numbers, row_numbers, points, strict=True):
        cells[column, row] = pick(cells.get((column, row), point.value), point.value)
    objective = _name_objective(summary.spec.objective or "", summary)
    title = f"{objective} over {names[0]} and {names[1]}"
    drawing = Drawing(title)
    best, least, greatest = pick(cells.values()), min(cells.values()), max(cells.values())
    opacity = Axis(least, greatest, 0.05, 0.7, room=0.0)
    width, height = (RIGHT - LEFT) / len(column_labels), (BOTTOM - TOP) / len(row_labels)
    for (column, row), value in sorted(cells.items(), key=lambda cell: cell[1] == best):  # Frames are drawn last.
        left, upper = LEFT + column * width, BOTTOM - (row + 1) * height
        frame = f'stroke="{LINE}" stroke-width="3"' if value == best else f'stroke="{PAPER}"'
        fill = f'fill="{DOT}" fill-opacity="{opacity.at(value):.2f}"'
        drawing.add_rectangle(left, upper, width, height, f"{fill} {frame}")
        if width >= 52 and height >= 18:
            drawing.add_text(left + width / 2, upper + height / 2 + 4, f"{value:.4g}", "middle")
    for number in _thin_out(len(column_labels), int((RIGHT - LEFT) / 60)):
        drawing.add_text(LEFT + (number + 0.5) * width, BOTTOM + 18, column_labels[number], "middle")
    for number in _thin_out(len(row_labels), int((BOTTOM - TOP) / 18)):
        drawing.add_text(LEFT - 8, BOTTOM - (number + 0.5) * height + 4, row_labels[number][:11], "end")
    drawing.add_axis_titles((LEFT + RIGHT) / 2, *names)
    drawing.add_text(RIGHT, TOP - 6, f"pale is {least:.3g}, strong is {greatest:.3g}", "end")
    return [(title, drawing.write())]


def _group_values(values: Sequence[Any]) -> tuple[list[str], list[int]] | None:
    """Return the labels of the rows or columns of a heat map, and the number of each value's row or column.

    Return None for too many values that are not numbers.
    """
    is_numeric = all(map(is_score, values))
    keys = [float(value) for value in values] if is_numeric else [str(value) for value in values]
    distinct: list[Any] = sorted(set(keys)) if is_numeric else list(dict.fromkeys(keys))
    if len(distinct) <= MAX_CELLS:
        return [_make_label(key) for key in distinct], [distinct.index(key) for key in keys]
    if not is_numeric:
        return None
    low = distinct[0]
    width = (distinct[-1] - low) / GROUPED_CELLS
    if not 0 < width < math.inf:
        return None
    labels = [_make_label(low + (number + 0.5) * width) for number in range(GROUPED_CELLS)]
    return labels, [min(GROUPED_CELLS - 1, int((value - low) / width)) for value in map(float, values)]


def _draw_parallel(summary: RunSummary, names: list[str]) -> list[Chart]:
    """Draw an axis for each variable and objective, and a line for each trial.

    A trial that is better by the first objective has a stronger line. There is no chart without variables, or if a
    variable has too many values that are not numbers.
    """
    spec, points = summary.spec, summary.points
    best = {result.meta.index for result in summary.best.results}
    sign = 1 if spec.objectives[0].direction == "minimize" else -1
    names = names[: MAX_AXES - len(spec.objectives)]
    if not names:
        return []
    columns = [[point.variables.get(name) for point in points] for name in names]
    columns += [[point.values[number] for point in points] for number in range(len(spec.objectives))]
    axes: list[PlacedValues] = []
    for column in columns:
        axis = _place_values(column)
        if axis is None:
            return []
        axes.append(axis)
    titles = [*names, *(_name_objective(item.name, summary) for item in spec.objectives)]
    gap = (RIGHT - LEFT - 40) / (len(titles) - 1)
    drawing = Drawing("every trial over its variables")
    xs = [LEFT + number * gap for number in range(len(titles))]
    ranked = sorted(enumerate(points), key=lambda item: (item[1].index in best, -sign * item[1].value))[-MAX_LINES:]
    for rank, (number, point) in enumerate(ranked, 1):
        path = _trace_line([(x, axis.pixels.get(number)) for x, axis in zip(xs, axes, strict=True)])
        strength = 0.06 + 0.6 * (rank / len(ranked)) ** 2
        style = BEST_LINE if point.index in best else f'stroke="{DOT}" stroke-opacity="{strength:.2f}"'
        drawing.add_path(path, style)
    for x, title, axis in zip(xs, titles, axes, strict=True):
        _draw_axis(drawing, x, title, axis)
    return [("every trial over its variables, the best in front", drawing.write())]


def _draw_axis(drawing: Drawing, x: float, title: str, axis: PlacedValues) -> None:
    drawing.add_path(f"M{x:.1f} {AXIS_TOP}V{AXIS_BOTTOM}", f'stroke="{INK}"')
    drawing.add_text(x, AXIS_BOTTOM + 24, shorten(title, 14), "middle")
    for y, label in axis.labels:
        drawing.add_path(f"M{x - 3:.1f} {y:.1f}h6", f'stroke="{INK}"')
        drawing.add_text(x - 6, y + 4, label[:9], "end", size=11, more=HALO)


def _trace_line(points: Sequence[tuple[float, float | None]]) -> str:
    """Return the SVG path through the points, with a gap where a point has no y."""
    path, command = "", "M"
    for x, y in points:
        if y is None:
            command = "M"
        else:
            path += f"{command}{x:.1f} {y:.1f}"
            command = "L"
    return path


def _place_values(values: Sequence[Any]) -> PlacedValues | None:
    """Return an axis with these values. Return None for too many values that are not numbers."""
    present = {number: value for number, value in enumerate(values) if value is not None}
    if present and all(map(is_score, present.values())):
        axis = Axis(min(present.values()), max(present.values()), AXIS_BOTTOM, AXIS_TOP, room=0.02)
        ticks = [(axis.at(tick), f"{tick:.4g}") for tick in axis.ticks()]
        return PlacedValues({number: axis.at(value) for number, value in present.items()}, ticks)
    names = {number: _make_label(value) for number, value in present.items()}
    distinct = list(dict.fromkeys(names.values()))
    if len(distinct) > MAX_NAMES:
        return None
    step = (AXIS_BOTTOM - AXIS_TOP) / max(1, len(distinct))
    pixels = {name: AXIS_BOTTOM - (number + 0.5) * step for number, name in enumerate(distinct)}
    shown = [distinct[number] for number in _thin_out(len(distinct), MAX_SHOWN_NAMES)]
    labels = [(pixels[name], name) for name in shown]
    return PlacedValues({number: pixels[name] for number, name in names.items()}, labels)


def _make_label(value: Any) -> str:
    return shorten(f"{value:.4g}" if is_score(value) else str(value), LABEL_CHARACTERS)


def _thin_out(count: int, most: int) -> range:
    """Return at most `most` evenly spaced numbers below `count`."""
    return range(0, count, max(1, math.ceil(count / max(1, most))))


def _name_objective(name: str, summary: RunSummary) -> str:
    """Return the objective's name in charts that also name variables, one of which may have the same name."""
    return f"{OUTPUTS}.{name}" if name in summary.table.columns.types[VARIABLES] else name
