"""The drawing of charts as SVG, in colours for light pages and dark ones.

A plotting library would be too large to install everywhere, and to import in every flow run, for a few charts.
"""

import html
import math
from collections.abc import Sequence

from ...sandbox.outcomes.text_escape import escape_text

WIDTH, HEIGHT = 760, 400  # pixels of the picture
LEFT, RIGHT, TOP, BOTTOM = 84, 736, 44, 344  # edges of the plot in the picture, in pixels
LOG_SCALE_RATIO = 1000  # an axis is logarithmic if its greatest value is this many times its least, or more
LEAST_SPAN = 1e-300  # the least span of an axis: floats have no ticks within a smaller one
MAX_TICKS = 12
MAX_LABEL_CHARACTERS = 80
LINE_CHARACTERS = 96  # characters of all labels below a plot
MANY_DOTS = 200  # more dots are smaller
# Each colour is a variable in the picture's CSS. The page, or the browser, decides whether it is light or dark.
COLORS = ("ink", "grid", "paper", "dot", "line", "failure")
LIGHT = ("#1c2430", "#dfe4ea", "#fff", "#2b6cb0", "#b45309", "#c53030")
DARK = ("#dde3ea", "#39434f", "#161b22", "#6cb0f5", "#f0a742", "#ff7b72")
INK, GRID, PAPER, DOT, LINE, FAILURE = (f"var(--{name})" for name in COLORS)
XML_ESCAPES = {0xFFFE: "?", 0xFFFF: "?"}  # the only characters from `escape_text` that XML cannot contain


class Axis:
    """A mapping of numbers to pixels. By default it is logarithmic if the numbers span more than `LOG_SCALE_RATIO`."""

    def __init__(
        self, low: float, high: float, start: float, end: float, *, whole: bool = False, room: float = 0.04,
        log: bool | None = None,
    ) -> None:  # fmt: skip
        """Make an axis for numbers from `low` to `high`, which have the pixels `start` and `end`.

        With `whole` the ticks are integers. Otherwise the part `room` of the axis is free at each end.
        """
        self.whole = whole
        self.log = not whole and low > LEAST_SPAN and (high / low >= LOG_SCALE_RATIO if log is None else log)
        low, high = self._scale(low), self._scale(high)
        has_one_value = high - low <= max(abs(high) * 1e-12, LEAST_SPAN)
        if has_one_value:
            margin = 0.5 if whole else max(abs(high), 1.0) * 0.05
        else:
            margin = 0.0 if whole else (high - low) * room
        self.low, self.high, self._start, self._end = low - margin, high + margin, start, end

    def _scale(self, value: float) -> float:
        return math.log10(value) if self.log else float(value)

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        share = (self._scale(value) - self.low) / (self.high - self.low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Return about five round values along the axis."""
        low, high = (10.0**self.low, 10.0**self.high) if self.log else (self.low, self.high)
        if self.log and self.high - self.low >= 2:
            first, last = math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9)
            every = max(1, (last - first) // 6 + 1)
            return [10.0**power for power in range(first, last + 1, every)]
        span = (high - low) / 5
        unit = 10.0 ** math.floor(math.log10(span))
        step = unit * 10
        for factor in (5, 2, 1):
            if unit * factor >= span:  # A smaller step would give more ticks.
                step = unit * factor
        if self.whole:
            step = max(1.0, step)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return [number * step for number in range(first, last + 1)][:MAX_TICKS]


class Drawing:
    """A picture, to which shapes are added."""

    def __init__(self, title: str) -> None:
        self._shapes: list[str] = []
        self.add_text(LEFT - 60, TOP - 20, title, size=15, more=' font-weight="600"')

    def add_text(
        self, x: float, y: float, text: str, anchor: str = "start", *, size: int = 12, fill: str = INK, more: str = ""
    ) -> None:
        """Add a text on one line, with `more` attributes."""
        clean = html.escape(escape_text(shorten(text, MAX_LABEL_CHARACTERS)).translate(XML_ESCAPES))
        position = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self._shapes.append(f'<text {position} font-size="{size}" fill="{fill}"{more}>{clean}</text>')

    def add_path(self, path: str, style: str) -> None:
        """Add the path, which is SVG."""
        self._shapes.append(f'<path d="{path}" fill="none" {style}/>')

    def add_circle(self, x: float, y: float, radius: float, style: str) -> None:
        """Add a circle."""
        self._shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" {style}/>')

    def add_rectangle(self, left: float, upper: float, width: float, height: float, style: str) -> None:
        """Add a rectangle."""
        self._shapes.append(f'<rect x="{left:.1f}" y="{upper:.1f}" width="{width:.1f}" height="{height:.1f}" {style}/>')

    def add_axis_titles(self, middle: float, across: str, up: str) -> None:
        """Add the titles of the lower and of the left axis."""
        self.add_text(middle, HEIGHT - 12, across, "middle")
        self.add_text(16, HEIGHT / 2, up, "middle", more=f' transform="rotate(-90 16 {HEIGHT / 2})"')

    def write(self) -> str:
        """Return the picture as SVG."""
        style = f"svg{{{_list_colors(LIGHT)}}}@media(prefers-color-scheme:dark){{svg{{{_list_colors(DARK)}}}}}"
        size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif"><style>{style}</style>'
            f'<rect width="100%" height="100%" fill="{PAPER}"/>{"".join(self._shapes)}</svg>'
        )


class Plot(Drawing):
    """A picture with two axes and a grid. Its dots and lines are in the units of the axes."""

    def __init__(
        self, title: str, xs: Sequence[float], ys: Sequence[float], across: str, up: str, *, whole: bool = False,
        names: Sequence[str] = (), log: bool | None = None,
    ) -> None:  # fmt: skip
        """Begin a plot of points at `xs` and `ys`. With `names`, each x is the position of a name. `log` is of `xs`."""
        super().__init__(title)
        self.x = Axis(min(xs), max(xs), LEFT + 12, RIGHT - 12, whole=whole, log=log)
        if names:  # The first name and the last one have as much room as the others.
            self.x = Axis(-0.5, len(names) - 0.5, LEFT, RIGHT, whole=True)
        self.y = Axis(min(ys), max(ys), BOTTOM - 10, TOP + 10)
        for tick in self.y.ticks():
            self.add_path(f"M{LEFT} {self.y.at(tick):.1f}H{RIGHT}", f'stroke="{GRID}"')
            self.add_text(LEFT - 8, self.y.at(tick) + 4, f"{tick:.4g}", "end")
        labels = [(tick, f"{tick:.0f}" if whole else f"{tick:.4g}") for tick in self.x.ticks()]
        if names:
            shown = range(0, len(names), math.ceil(len(names) / MAX_TICKS))
            labels = [(number, shorten(names[number], LINE_CHARACTERS // len(shown))) for number in shown]
        for x, label in labels:
            self.add_text(self.x.at(x), BOTTOM + 18, label, "middle")
        self.add_path(f"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}", f'stroke="{INK}"')
        self.add_axis_titles((LEFT + RIGHT) / 2, across, up)

    def add_dots(self, points: Sequence[tuple[float, float]], style: str, radius: float = 4) -> None:
        """Add a dot for each point. Many dots are smaller."""
        for x, y in points:
            self.add_circle(self.x.at(x), self.y.at(y), radius if len(points) <= MANY_DOTS else 2.2, style)

    def add_line(self, points: Sequence[tuple[float, float]], style: str) -> None:
        """Add a line from point to point."""
        path = "L".join(f"{self.x.at(x):.1f} {self.y.at(y):.1f}" for x, y in points)
        self.add_path(f"M{path}", f'stroke-linejoin="round" {style}')

    def add_legend(self, text: str, color: str, offset: float = 0) -> None:
        """Add a line of the legend, `offset` pixels from the right."""
        self.add_text(RIGHT - offset, TOP - 6, text, "end", fill=color)


def _list_colors(colors: Sequence[str]) -> str:
    """Return CSS that sets the variables of `COLORS`."""
    return "".join(f"--{name}:{color};" for name, color in zip(COLORS, colors, strict=True))


def shorten(text: str, length: int) -> str:
    """Return the text, cut to a length."""
    return text if len(text) <= length else text[: length - 3] + "..."
