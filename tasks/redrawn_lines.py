"""Lines of output that a program redraws, such as progress bars, reduced to the last state of each line."""

import re

# A return to the line's beginning, a step back, and the terminal's commands that move the cursor, erase or hide it.
_MOVE = re.compile(r"[\r\n\b]|\x1b\[(?:\?[\d;]*[hl]|(\d*)([A-HJK]))")
_UNFINISHED = re.compile(r"\x1b(?:\[[?\d;]*)?\Z")
MAX_TAIL_CHARACTERS = 20_000  # characters of output whose last lines are shown
MAX_KEPT_LINES = 100  # The number of lines that a cursor may move up.


class RedrawnLines:
    """A parser that takes output in pieces and returns complete lines of at most `max_characters`.

    If the output moves the cursor up by some lines, that many lines are held back until they are redrawn.
    """

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._lines = [""]
        self._row = 0
        self._back = 0  # characters between the cursor and the line's end
        self._kept_count = 1  # lines to which the cursor may go back, as seen so far
        self._unfinished = ""

    def feed(self, text: str) -> list[str]:
        """Return the lines that are complete now."""
        text = self._unfinished + text
        unfinished = _UNFINISHED.search(text)
        self._unfinished = unfinished[0] if unfinished is not None else ""
        text = text[: len(text) - len(self._unfinished)]
        complete: list[str] = []
        end = 0
        for match in _MOVE.finditer(text):
            self._put(text[end : match.start()])
            self._move(match, complete)
            end = match.end()
        self._put(text[end:])
        return complete

    def finish(self) -> list[str]:
        """Return the remaining lines, and clear them."""
        self._put(self._unfinished)
        lines, self._lines, self._row, self._back, self._unfinished = self._lines, [""], 0, 0, ""
        return lines

    def _put(self, text: str) -> None:
        if text:
            line = self._lines[self._row]
            self._lines[self._row] = (line[: len(line) - self._back] + text)[: self._max_characters]
            self._back = 0

    def _move(self, match: re.Match[str], complete: list[str]) -> None:
        count, command = int((match[1] or "1")[:6]), match[2] or match[0]
        line = self._lines[self._row]
        if command == "\n":
            self._go_to_row(self._row + 1)
            while len(self._lines) > self._kept_count:
                complete.append(self._lines.pop(0))
                self._row -= 1
        elif command == "\b":
            self._back = min(self._back + 1, len(line))
        elif command == "\r" or (command == "G" and count == 1):
            self._back = len(line)
        elif command in "AF":
            self._go_to_row(self._row - count)
        elif command in "BE":
            self._go_to_row(min(self._row + count, len(self._lines) - 1))
        elif command == "H":
            self._go_to_row(0)
        elif command in "JK":
            self._lines[self._row] = line[: len(line) - self._back] if match[1] in ("", "0") else ""
            self._back = 0
            if command == "J":
                del self._lines[self._row + 1 :]

    def _go_to_row(self, row: int) -> None:
        """Move the cursor to the beginning of a row, which may be below the last row or above the first."""
        if row < 0:  # Those lines were returned already, so text drawn over them is new.
            missing = min(-row, MAX_KEPT_LINES - len(self._lines))
            self._lines[:0] = [""] * max(0, missing)
            self._kept_count = max(self._kept_count, len(self._lines))
            row = 0
        elif row == len(self._lines):
            self._lines.append("")
        self._row = row
        self._back = len(self._lines[row])


def redraw_lines(text: str) -> list[str]:
    """Return the last lines of some output, each in its last state, without blank lines."""
    lines = RedrawnLines(MAX_TAIL_CHARACTERS)
    return [line for line in lines.feed(text[-MAX_TAIL_CHARACTERS:]) + lines.finish() if line.strip()]
