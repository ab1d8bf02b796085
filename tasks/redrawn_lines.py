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
        # The next piece may begin with a line feed, so a carriage return at the end has overwritten nothing yet.
        self._unfinished = self._get_last_state(unfinished) + ("\r" if unfinished.endswith("\r") else "")
        return [self._get_last_state(line) for line in complete]

    def finish(self) -> list[str]:
        """Return the unfinished line, if there is one, and clear it."""
        line, self._unfinished = self._get_last_state(self._unfinished), ""
        return [line] if line else []

    def _get_last_state(self, line: str) -> str:
        return line.rstrip("\r").rpartition("\r")[2][: self._max_characters]


def redraw_lines(text: str) -> list[str]:
    """Return the last lines of some output, each in its last state, without blank lines."""
    lines = RedrawnLines(MAX_TAIL_CHARACTERS)
    return [line for line in lines.feed(text[-MAX_TAIL_CHARACTERS:]) + lines.finish() if line.strip()]
