"""A chart of how much each variable has to do with the objective."""

from collections.abc import Mapping

from .svg import BOTTOM, DOT, HEIGHT, LEFT, RIGHT, TOP, WIDTH, draw_text, wrap_svg

MAX_BARS = 12
NAME_WIDTH = 130  # pixels, of which LEFT is a part
MAX_BAR_HEIGHT = 34.0


def draw_importances(importances: Mapping[str, float], *, title: str) -> str:
    """Bars of shares of one, the longest first; `MAX_BARS` at most."""
    bars = sorted(importances.items(), key=lambda item: -item[1])[:MAX_BARS]
    left, top, most = LEFT + NAME_WIDTH, TOP + 4, max(bars[0][1], 1e-9)
    height = min(MAX_BAR_HEIGHT, (HEIGHT - BOTTOM / 2 - top) / len(bars))
    shapes = [draw_text(LEFT, TOP - 20, title, size=15, bold=True)]
    for number, (name, share) in enumerate(bars):
        upper = top + number * height
        width = (WIDTH - RIGHT - 60 - left) * share / most
        shapes.append(
            f'<rect x="{left}" y="{upper + height * 0.15:.1f}" width="{max(width, 1):.1f}" height="{height * 0.7:.1f}" '
            f'rx="2" fill="{DOT}"/>'
        )
        shapes.append(
            draw_text(left - 8, upper + height / 2 + 4, name if len(name) <= 26 else f"{name[:23]}...", anchor="end")
        )
        shapes.append(draw_text(left + width + 8, upper + height / 2 + 4, f"{share:.2f}"))
    return wrap_svg(shapes, top + len(bars) * height + BOTTOM / 4)
