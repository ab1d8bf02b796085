"""A chart of values in their order, as dots, and the best so far."""

from collections.abc import Sequence

from .svg import BOTTOM, DOT, FAILURE, HEIGHT, LEFT, LINE, RIGHT, TOP, WIDTH, Axis, draw_frame, draw_text, wrap_svg


def draw_series(
    points: Sequence[tuple[int, float]],
    *,
    title: str,
    across: str,
    up: str,
    failed: Sequence[int] = (),
    best: str | None = None,
    pruned: Sequence[tuple[int, float]] = (),
) -> str:
    """Values by their numbers, as dots. `failed` are numbers without a value, marked below the axis.

    With `best`, "minimize" or "maximize", a line follows the best so far. `pruned` are the last values of trials that
    were ended before they had one: rings, which the line does not follow.
    """
    numbers = [number for number, _ in (*points, *pruned)] + list(failed)
    values = [value for _, value in (*points, *pruned)]
    x = Axis(min(numbers, default=0), max(numbers, default=1), LEFT + 12, WIDTH - RIGHT - 12, whole=True)
    y = Axis(min(values, default=0.0), max(values, default=1.0), HEIGHT - BOTTOM - 10, TOP + 10)
    shapes = draw_frame(title, across, up, x, y)
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
        shapes.append(draw_text(WIDTH - RIGHT, TOP - 10, "best so far", anchor="end", fill=LINE))
    radius = 4 if len(points) <= 200 else 2.2
    for number, value in points:
        shapes.append(
            f'<circle cx="{x.at(number):.1f}" cy="{y.at(value):.1f}" r="{radius}" fill="{DOT}" fill-opacity=".75"/>'
        )
    for number, value in pruned:
        shapes.append(
            f'<circle cx="{x.at(number):.1f}" cy="{y.at(value):.1f}" r="{radius}" fill="none" stroke="{DOT}" '
            f'stroke-opacity=".75"/>'
        )
    for number in failed:
        at, low = x.at(number), HEIGHT - BOTTOM
        shapes.append(f'<path d="M{at - 3:.1f} {low - 6}l6 6m0 -6l-6 6" stroke="{FAILURE}" stroke-width="1.6"/>')
    return wrap_svg(shapes)
