"""The charts of a report: the best so far, reported values, and the variables' effect on the objective."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..search.importances import Importances
from .best_trials import is_score
from .columns import OUTPUTS, VARIABLES
from .summary import ChartPoint, RunSummary
from .svg import BOTTOM, DOT, FAILURE, INK, LEFT, LINE, PAPER, RIGHT, TOP, Axis, Drawing, Plot, shade, shorten

Chart = tuple[str, str]  # the title, and the picture as SVG
MAX_CHART_VALUE = 1e200  # the greatest absolute value in a chart: axes have no room beyond it
MAX_CELLS = 30  # rows, and also columns, of a heat map; more numeric values are grouped
MAX_BARS = 12
MAX_AXES = 9  # axes of parallel coordinates
MAX_LINES = 400  # lines of parallel coordinates
MAX_NAMES = 30  # values of a variable that is not a number
LABEL_CHARACTERS = 24
DOTS, RINGS = f'fill="{DOT}" fill-opacity=".75"', f'fill="none" stroke="{DOT}" stroke-opacity=".75"'
INFEASIBLE_RINGS = f'fill="none" stroke="{FAILURE}" stroke-opacity=".75"'
BEST_LINE = f'stroke="{LINE}" stroke-width="2.4"'
HALO = f' paint-order="stroke" stroke="{PAPER}" stroke-width="4"'  # keeps a label legible where lines cross it


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
        charts = [_draw_front(summary, place) for place in range(1, len(spec.objectives))]
        return [*charts, *_draw_parallel(summary, names)]
    charts = [_draw_history(summary), *_draw_heat_map(summary, names), *_draw_curves(summary)]
    if importances is not None:
        charts.append(_draw_importances(importances, spec.objective or ""))
    return charts if len(names) < 2 else [*charts, *_draw_parallel(summary, names)]


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
        pick = min if spec.direction == "minimize" else max
        best = [*itertools.accumulate((value for _, value in points), pick)]
        steps = [points[0]]
        for (number, _), before, after in zip(points[1:], best, best[1:], strict=False):
            if after != before:
                steps += [(number, before), (number, after)]
        plot.add_line([*steps, (max(numbers), best[-1])], BEST_LINE)
        plot.add_legend("best so far", LINE)
    plot.add_dots(points, DOTS)
    plot.add_dots(pruned, RINGS)
    _add_infeasible(plot, infeasible)
    for number in summary.failed_indexes:
        plot.add_path(f"M{plot.x.at(number) - 3:.1f} {BOTTOM - 6}l6 6m0 -6l-6 6", f'stroke="{FAILURE}"')
    return title, plot.write()


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
    opacity = max(0.25, min(0.8, 12 / len(curves)))
    for curve in sorted(curves, key=lambda curve: curve.index == best):  # The best is drawn over the others.
        style = BEST_LINE if curve.index == best else f'stroke="{DOT}" stroke-opacity="{opacity:.2f}"'
        plot.add_line(curve.points, style)
        if curve.is_pruned or len(curve.points) == 1:
            plot.add_dots(curve.points[-1:], DOTS, 2.5)
    plot.add_legend("the best trial", LINE)
    if any(curve.is_pruned for curve in curves):
        plot.add_legend("a dot is where a trial was pruned", DOT, 100)
    return [(title, plot.write())]


def _draw_front(summary: RunSummary, place: int) -> Chart:
    """Draw the first objective and another one: all trials as dots, and the front as larger dots with a line."""
    first, other = summary.spec.objectives[0], summary.spec.objectives[place]
    title = f"{first.name} and {other.name}, with the Pareto front"
    feasible, infeasible = (
        [(point.value, point.values[place]) for point in summary.points if point.is_feasible is wanted]
        for wanted in (True, False)
    )
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
    height, most = min(34.0, (BOTTOM + 24 - TOP) / len(bars)), max(bars[0][1], 1e-9)
    for number, (name, share) in enumerate(bars):
        upper, width = TOP + 4 + number * height, (RIGHT - 60 - left) * share / most
        drawing.add_rectangle(left, upper + height * 0.15, max(width, 1), height * 0.7, f'fill="{DOT}"')
        drawing.add_text(left - 8, upper + height / 2 + 4, shorten(name, 26), "end")
        drawing.add_text(left + width + 8, upper + height / 2 + 4, f"{share:.2f}")
    return title, drawing.write(TOP + 18 + len(bars) * height)


def _draw_heat_map(summary: RunSummary, names: list[str]) -> list[Chart]:
    """Draw a cell for each pair of values of two variables, with the best value of its trials."""
    points = [point for point in summary.points if point.is_feasible]
    if len(names) != 2 or not points:
        return []
    columns, rows = (_make_steps([point.variables.get(name) for point in points]) for name in names)
    if columns is None or rows is None:
        return []
    (column_names, find_column), (row_names, find_row) = columns, rows
    pick = min if summary.spec.direction == "minimize" else max
    cells: dict[tuple[int, int], float] = {}
    for point in points:
        place = find_column(point.variables.get(names[0])), find_row(point.variables.get(names[1]))
        cells[place] = pick(cells.get(place, point.value), point.value)
    value_name = _name_objective(summary.spec.objective or "", summary)
    title = f"{value_name} over {names[0]} and {names[1]}"
    drawing, right = Drawing(title), RIGHT - 86
    least, greatest, best = min(cells.values()), max(cells.values()), pick(cells.values())
    scale = Axis(least, greatest, 0.0, 1.0, room=0.0)
    width, height = (right - LEFT) / len(column_names), (BOTTOM - TOP) / len(row_names)
    for (column, row), value in sorted(cells.items(), key=lambda item: item[1] == best):  # Frames are drawn last.
        left, upper, share = LEFT + column * width, BOTTOM - (row + 1) * height, scale.at(value)
        frame = f'stroke="{LINE}" stroke-width="3"' if value == best else f'stroke="{PAPER}"'
        drawing.add_rectangle(left, upper, width, height, f'fill="{shade(share)}" {frame}')
        if width >= 52 and height >= 18:
            ink = "#fff" if share < 0.6 else "#1c2430"
            drawing.add_text(left + width / 2, upper + height / 2 + 4, f"{value:.4g}", "middle", fill=ink)
    for number in _thin_out(len(column_names), int((right - LEFT) / 60)):
        drawing.add_text(LEFT + (number + 0.5) * width, BOTTOM + 18, column_names[number], "middle")
    for number in _thin_out(len(row_names), int((BOTTOM - TOP) / 18)):
        drawing.add_text(LEFT - 8, BOTTOM - (number + 0.5) * height + 4, row_names[number][:11], "end")
    drawing.add_axis_titles((LEFT + right) / 2, *names)
    step = (BOTTOM - TOP) / 40
    for number in range(40):
        drawing.add_rectangle(right + 20, BOTTOM - (number + 1) * step, 14, step + 0.6, f'fill="{shade(number / 39)}"')
    drawing.add_text(right + 38, BOTTOM, f"{least:.3g}")
    drawing.add_text(right + 38, TOP + 10, f"{greatest:.3g}")
    drawing.add_text(right + 20, TOP - 6, value_name[:12])
    return [(title, drawing.write())]


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


def _draw_parallel(summary: RunSummary, names: list[str]) -> list[Chart]:
    """Draw an axis for each variable and objective, and a line for each trial.

    A trial that is better by the first objective has a stronger line. There is no chart without variables, or if a
    variable has too many values that are not numbers.
    """
    spec, points = summary.spec, summary.points
    names = names[: MAX_AXES - len(spec.objectives)]
    lower, upper = BOTTOM + 10.0, TOP + 24.0
    columns = [[point.variables.get(name) for point in points] for name in names]
    columns += [[point.values[place] for point in points] for place in range(len(spec.objectives))]
    axes = [axis for column in columns if (axis := _make_axis(column, lower, upper)) is not None]
    if not names or len(axes) < len(columns):
        return []
    titles = [*names, *(_name_objective(item.name, summary) for item in spec.objectives)]
    gap = (RIGHT - LEFT - 40) / (len(titles) - 1)
    across = [LEFT + number * gap for number in range(len(titles))]
    drawing = Drawing("every trial over its variables")
    best = {result.meta.index for result in summary.best.results}
    sign = 1 if spec.objectives[0].direction == "minimize" else -1

    def rank(point: ChartPoint) -> tuple[bool, float]:
        return point.index in best, -sign * point.value

    shown = sorted(points, key=rank)[-MAX_LINES:]
    for number, point in enumerate(shown, 1):
        path, is_drawing = "", False
        values = [*(point.variables.get(name) for name in names), *point.values]
        for x, (find_place, _), value in zip(across, axes, values, strict=True):
            y = None if value is None else find_place(value)
            if y is not None:
                path += f"{'L' if is_drawing else 'M'}{x:.1f} {y:.1f}"
            is_drawing = y is not None
        strength = 0.06 + 0.6 * (number / len(shown)) ** 2
        is_best = point.index in best
        drawing.add_path(path, BEST_LINE if is_best else f'stroke="{DOT}" stroke-opacity="{strength:.2f}"')
    for x, text, (_, labels) in zip(across, titles, axes, strict=True):
        drawing.add_path(f"M{x:.1f} {upper}V{lower}", f'stroke="{INK}"')
        drawing.add_text(x, lower + 24, shorten(text, 14), "middle")
        for y, label in labels:
            drawing.add_path(f"M{x - 3:.1f} {y:.1f}h6", f'stroke="{INK}"')
            drawing.add_text(x - 6, y + 4, label[:9], "end", size=11, more=HALO)
    return [("every trial over its variables, the best in front", drawing.write())]


def _make_axis(
    values: Sequence[Any], lower: float, upper: float
) -> tuple[Callable[[Any], float | None], list[tuple[float, str]]] | None:
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
    return shorten(f"{value:.4g}" if is_score(value) else str(value), LABEL_CHARACTERS)


def _thin_out(count: int, most: int) -> range:
    """Return at most `most` evenly spaced numbers below `count`."""
    return range(0, count, max(1, math.ceil(count / max(1, most))))


def _name_objective(name: str, summary: RunSummary) -> str:
    """Return the objective's name in charts that also name variables, one of which may have the same name."""
    return f"{OUTPUTS}.{name}" if name in summary.table.columns.types[VARIABLES] else name
