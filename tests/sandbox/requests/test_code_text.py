"""Tests of how code is found in a text."""

import time

import pytest

from rlm_batch.sandbox.requests.code_text import clean_code


@pytest.mark.parametrize("code", ["```" + "a" * 1_000_000 + "`", "```" + " " * 1_000_000 + "`", "`" * 1_000_000])
def test_a_hostile_code_is_cleaned_in_linear_time(code: str) -> None:
    began = time.monotonic()
    clean_code(code)
    assert time.monotonic() - began < 5
