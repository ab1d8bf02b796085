"""A chart of two objectives, with the trials that no other beats."""

from collections.abc import Sequence

from .svg import BOTTOM, DOT, HEIGHT, LEFT, LINE, RIGHT, TOP, WIDTH, Axis, draw_frame, draw_text, wrap_svg

Pair = tuple[float, float]


def draw_pareto_front(points: Sequence[Pair], front: Sequence[Pair], *, title: str, across: str, up: str) -> str:
    """All trials as dots, and those of the front as larger ones; a line joins them where there are two objectives."""
    everything = [*points, *front]
    x = Axis(min(a for a, _ in everything), max(a for a, _ in everything), LEFT + 12, WIDTH - RIGHT - 12)
    y = Axis(min(b for _, b in everything), max(b for _, b in everything), HEIGHT - BOTTOM - 10, TOP + 10)
    shapes = draw_frame(title, across, up, x, y)
    radius = 3.5 if len(points) <= 200 else 2.2
    for first, second in points:
        shapes.append(
            f'<circle cx="{x.at(first):.1f}" cy="{y.at(second):.1f}" r="{radius}" fill="{DOT}" fill-opacity=".5"/>'
        )
    ordered = sorted(front)
    if len(ordered) > 1:
        path = "L".join(f"{x.at(first):.1f} {y.at(second):.1f}" for first, second in ordered)
        shapes.append(f'<path d="M{path}" fill="none" stroke="{LINE}" stroke-opacity=".6"/>')
    for first, second in ordered:
        shapes.append(f'<circle cx="{x.at(first):.1f}" cy="{y.at(second):.1f}" r="5" fill="{LINE}"/>')
    shapes.append(draw_text(WIDTH - RIGHT, TOP - 10, "on the front", anchor="end", fill=LINE))
    return wrap_svg(shapes)
