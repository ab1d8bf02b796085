"""What charts are drawn with, as SVG: axes, text, a frame, and colours for light and dark pages.

A writer of our own, because a plotting library and what it stands on is much to install everywhere, and to import in
every flow run, for a few charts.
"""

import html
import math
from typing import Any

from ....sandbox.outcomes.text_escape import escape_text
from ..best_trial import is_score

WIDTH, HEIGHT = 760, 400  # pixels of the picture
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 44, 56  # pixels around the plot
LABEL_CHARACTERS = 24
LOG_SCALE_RATIO = 1000  # the greatest over the least value from which on an axis is logarithmic
LEAST_SPAN = 1e-300  # of values that differ on an axis: below it there are no numbers for ticks between them
# A page, or the browser, says which of the two it is; a picture within it follows.
LIGHT = {
    "ink": "#1c2430",
    "grid": "#dfe4ea",
    "paper": "#fff",
    "dot": "#2b6cb0",
    "line": "#b45309",
    "failure": "#c53030",
}
DARK = {
    "ink": "#dde3ea",
    "grid": "#39434f",
    "paper": "#161b22",
    "dot": "#6cb0f5",
    "line": "#f0a742",
    "failure": "#ff7b72",
}
INK, GRID, PAPER, DOT, LINE, FAILURE = (f"var(--{name})" for name in LIGHT)
XML_ESCAPES = {0xFFFE: "?", 0xFFFF: "?"}  # the only letters that XML cannot hold and `escape_text` lets through


class Axis:
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


def make_label(value: Any) -> str:
    """A value as it stands at an axis."""
    text = f"{value:.4g}" if is_score(value) else str(value)
    return text if len(text) <= LABEL_CHARACTERS else text[: LABEL_CHARACTERS - 3] + "..."


def thin_out(count: int, most: int) -> range:
    """Some of the numbers below `count`, evenly, no more than `most`."""
    return range(0, count, max(1, math.ceil(count / max(1, most))))


def draw_frame(title: str, across: str, up: str, x: Axis, y: Axis) -> list[str]:
    """The title, the axes with their titles and ticks, and the grid."""
    shapes = [draw_text(LEFT, TOP - 20, title, size=15, bold=True)]
    for tick in y.ticks():
        at = y.at(tick)
        shapes.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        shapes.append(draw_text(LEFT - 8, at + 4, f"{tick:.4g}", anchor="end"))
    low = HEIGHT - BOTTOM + 18
    form = ".0f" if x.whole else ".4g"
    shapes += [draw_text(x.at(tick), low, f"{tick:{form}}", anchor="middle") for tick in x.ticks()]
    shapes.append(f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="{INK}"/>')
    return shapes + draw_axis_titles((LEFT + WIDTH - RIGHT) / 2, across, up)


def draw_axis_titles(middle: float, across: str, up: str) -> list[str]:
    """The titles of both axes; the one across stands at `middle`."""
    turned = f' transform="rotate(-90 16 {HEIGHT / 2})"'
    return [
        draw_text(middle, HEIGHT - 12, across, anchor="middle"),
        draw_text(16, HEIGHT / 2, up, anchor="middle", more=turned),
    ]


def draw_text(
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
    """A text on one line, of 80 characters at most."""
    weight = ' font-weight="600"' if bold else ""
    short = text if len(text) <= 80 else text[:77] + "..."
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"{weight}{more}>'
        f"{html.escape(escape_text(short).translate(XML_ESCAPES))}</text>"
    )


def wrap_svg(shapes: list[str], height: float = HEIGHT) -> str:
    """The picture that these shapes make."""
    light, dark = ("".join(f"--{name}:{color};" for name, color in colors.items()) for colors in (LIGHT, DARK))
    style = f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif"><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="{PAPER}"/>{"".join(shapes)}</svg>'
    )
