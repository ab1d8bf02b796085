"""The charts of a report: the best so far, reported values, and the variables' effect on the objective."""

from typing import Any

from ..search.importances import Importances
from .columns import OUTPUTS, VARIABLES
from .summary import RunSummary
from .svg import draw_curves, draw_heat_map, draw_importances, draw_parallel_coordinates, draw_pareto_front, draw_series

Chart = tuple[str, str]  # the title, and the picture as SVG
MAX_CHART_VALUE = 1e200  # the greatest absolute value in a chart: axes have no room beyond it


def build_charts(summary: RunSummary, importances: Importances | None = None) -> list[Chart]:
    """Return the charts of a run. They show its objectives, or the seconds of executions if it has no objectives."""
    if len(summary.points) < 2 or not all(abs(v) <= MAX_CHART_VALUE for point in summary.points for v in point.values):
        return []
    if not summary.spec.objectives:
        return [_draw_history(summary)]
    points = summary.points
    names = list(dict.fromkeys(name for point in points for name in point.variables))
    names = [name for name in names if len({repr(point.variables.get(name))[:200] for point in points}) > 1]
    if len(summary.spec.objectives) > 1:
        return [*_draw_fronts(summary), *_draw_parallel(summary, names)]
    charts = [_draw_history(summary), *_draw_heat_map(summary, names), *_draw_curves(summary)]
    charts += _draw_importances(summary, importances)
    return charts if len(names) < 2 else [*charts, *_draw_parallel(summary, names)]


def _draw_history(summary: RunSummary) -> Chart:
    spec = summary.spec
    value_name = spec.objective or "seconds"
    title = f"{value_name} over {spec.noun}s"
    history = draw_series(
        [(point.index, point.value) for point in summary.points if point.is_feasible],
        title=title,
        across=spec.noun,
        up=value_name,
        failed=summary.failed_indexes,
        best=spec.direction if spec.objective is not None else None,
        pruned=[(point.index, point.value) for point in summary.pruned_points if abs(point.value) <= MAX_CHART_VALUE],
        infeasible=[(point.index, point.value) for point in summary.points if not point.is_feasible],
    )
    return (title, history)


def _draw_heat_map(summary: RunSummary, names: list[str]) -> list[Chart]:
    spec, points = summary.spec, [point for point in summary.points if point.is_feasible]
    if (
        len(names) != 2
        or not points
        or not all(_is_short_value(point.variables.get(name)) for point in points for name in names)
    ):
        return []
    across, up = names
    value_name = _name_objective(spec.objective or "", summary)
    title = f"{value_name} over {across} and {up}"
    heat_map = draw_heat_map(
        [(point.variables.get(across), point.variables.get(up), point.value) for point in points],
        title=title,
        across=across,
        up=up,
        value=value_name[:12],
        best=spec.direction,
    )
    return [] if heat_map is None else [(title, heat_map)]


def _draw_curves(summary: RunSummary) -> list[Chart]:
    if all(len(curve.points) < 2 for curve in summary.curves):
        return []
    if any(abs(value) > MAX_CHART_VALUE for curve in summary.curves for _, value in curve.points):
        return []
    best = summary.best.result
    title = f"{summary.spec.objective} as it was reported"
    curves = [
        (curve.points, curve.is_pruned, best is not None and curve.index == best.meta.index) for curve in summary.curves
    ]
    return [(title, draw_curves(curves, title=title, across="step", up="reported value"))]


def _draw_importances(summary: RunSummary, importances: Importances | None) -> list[Chart]:
    if importances is None:
        return []
    title = f"importance of each variable for {summary.spec.objective} ({importances.method})"
    return [(title, draw_importances(importances.shares, title=title))]


def _draw_parallel(summary: RunSummary, names: list[str]) -> list[Chart]:
    spec, points = summary.spec, summary.points
    best = {result.meta.index for result in summary.best.results}
    picture = draw_parallel_coordinates(
        [(point.variables, point.values, point.index in best) for point in points],
        names=names,
        objectives=[(_name_objective(item.name, summary), item.direction) for item in spec.objectives],
        title="every trial over its variables",
    )
    return [] if picture is None else [("every trial over its variables, the best in front", picture)]


def _draw_fronts(summary: RunSummary) -> list[Chart]:
    """Return pictures of the Pareto front: the first objective with each of the others."""
    first, *others = summary.spec.objectives
    charts: list[Chart] = []
    for place, other in enumerate(others, 1):
        title = f"{first.name} and {other.name}, with the Pareto front"
        picture = draw_pareto_front(
            [(point.value, point.values[place]) for point in summary.points if point.is_feasible],
            [(float(r.outputs[first.name]), float(r.outputs[other.name])) for r in summary.best.results],
            title=title,
            across=f"{first.name} ({first.direction})",
            up=f"{other.name} ({other.direction})",
            infeasible=[(point.value, point.values[place]) for point in summary.points if not point.is_feasible],
        )
        charts.append((title, picture))
    return charts


def _name_objective(name: str, summary: RunSummary) -> str:
    """Return the objective's name in charts that also name variables, one of which may have the same name."""
    return f"{OUTPUTS}.{name}" if name in summary.table.columns.types[VARIABLES] else name


def _is_short_value(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, str) and len(value) <= 200)
