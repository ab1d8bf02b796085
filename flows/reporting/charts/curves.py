"""A chart of what trials have reported, a line for each."""

from collections.abc import Sequence

from .svg import BOTTOM, DOT, HEIGHT, LEFT, LINE, RIGHT, TOP, WIDTH, Axis, draw_frame, draw_text, wrap_svg

Points = Sequence[tuple[int, float]]


def draw_curves(curves: Sequence[tuple[Points, bool, bool]], *, title: str, across: str, up: str) -> str:
    """Values by steps. A curve is its points, whether its trial was pruned, and whether it is the best one's.

    One that was pruned ends in a dot.
    """
    points = [point for line, _, _ in curves for point in line]
    steps, values = [step for step, _ in points], [value for _, value in points]
    x = Axis(min(steps), max(steps), LEFT + 12, WIDTH - RIGHT - 12, whole=True)
    y = Axis(min(values), max(values), HEIGHT - BOTTOM - 10, TOP + 10)
    shapes = draw_frame(title, across, up, x, y)
    opacity = max(0.25, min(0.8, 12 / len(curves)))
    for line, is_pruned, is_best in sorted(curves, key=lambda curve: curve[2]):  # the best last, over the others
        if not line:
            continue
        path = "L".join(f"{x.at(step):.1f} {y.at(value):.1f}" for step, value in line)
        style = f'stroke="{LINE}" stroke-width="2.4"' if is_best else f'stroke="{DOT}" stroke-opacity="{opacity:.2f}"'
        shapes.append(f'<path d="M{path}" fill="none" stroke-linejoin="round" {style}/>')
        if is_pruned or len(line) == 1:
            step, value = line[-1]
            shapes.append(
                f'<circle cx="{x.at(step):.1f}" cy="{y.at(value):.1f}" r="2.5" fill="{DOT}" fill-opacity=".6"/>'
            )
    legend = "a dot is where a trial was pruned" if any(is_pruned for _, is_pruned, _ in curves) else ""
    if any(is_best for _, _, is_best in curves):
        shapes.append(draw_text(WIDTH - RIGHT, TOP - 10, "the best trial", anchor="end", fill=LINE))
    shapes.append(draw_text(WIDTH - RIGHT - 100, TOP - 10, legend, anchor="end", fill=DOT))
    return wrap_svg(shapes)
