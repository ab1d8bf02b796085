"""Lines of output in which a carriage return overwrites the line, as progress bars do."""

MAX_TAIL_CHARACTERS = 20_000  # characters of output whose last lines are shown


class RedrawnLines:
    """A parser that takes output in pieces and returns complete lines of at most `max_characters`."""

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._unfinished = ""

    def feed(self, text: str) -> list[str]:
        """Return the lines that are complete now."""
        *complete, unfinished = (self._unfinished + text).split("\n")
        self._unfinished = self._get_last_state(unfinished)
        if unfinished.endswith("\r"):
            self._unfinished += "\r"  # It overwrites nothing if the next piece begins with a line feed.
        return [self._get_last_state(line) for line in complete]

    def finish(self) -> list[str]:
        """Return the unfinished line, if there is one, and clear it."""
        line = self._get_last_state(self._unfinished)
        self._unfinished = ""
        return [line] if line else []

    def _get_last_state(self, line: str) -> str:
        """Return the text after the last carriage return that has overwritten something."""
        return line.rstrip("\r").rpartition("\r")[2][: self._max_characters]


def redraw_lines(text: str) -> list[str]:
    """Return the last lines of some output, each in its last state, without blank lines."""
    parser = RedrawnLines(MAX_TAIL_CHARACTERS)
    lines = parser.feed(text[-MAX_TAIL_CHARACTERS:]) + parser.finish()
    return [line for line in lines if line.strip()]
