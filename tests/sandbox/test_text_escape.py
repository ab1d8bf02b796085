"""Tests of escaping text from code for display."""

import unicodedata

from rlm_batch import CodeError
from rlm_batch.sandbox.outcomes.text_escape import escape_text

BIDIRECTIONAL = ("ALM", "LRE", "LRO", "RLE", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
# Unicode names of marks whose bidirectional class is not in the list above.
MARKS = ("LEFT-TO-RIGHT MARK", "RIGHT-TO-LEFT MARK", "ARABIC LETTER MARK")


def test_characters_that_reverse_a_line_are_escaped() -> None:
    turning = [letter for letter in map(chr, range(0x110000)) if unicodedata.bidirectional(letter) in BIDIRECTIONAL]
    turning += map(unicodedata.lookup, MARKS)
    assert len(turning) == 12
    for letter in turning:
        assert escape_text(f"if a{letter}b") == f"if a\\u{ord(letter):04x}b"


def test_a_summary_is_one_line_for_a_text_of_any_length() -> None:
    error = CodeError("\x7f" * 1_000_000 + "\nmore")
    assert error.summary == "\\x7f" * 500 + "..."
    assert CodeError("é" * 500 + "\nmore").summary == "é" * 500


def test_ordinary_text_in_any_language_is_unchanged() -> None:
    for text in ("שלום", "مرحبا", "naïve 数 🙂 a\tb"):
        assert escape_text(text, keep="\t") == text
