"""Tests of how code is found in a text."""

import pytest

from rlm_batch.sandbox.requests.code_text import clean_code


@pytest.mark.parametrize("code", ["```" + "a" * 1_000_000 + "`", "```" + " " * 1_000_000 + "`", "`" * 1_000_000])
@pytest.mark.timeout(60)  # quadratic time would be hours
def test_a_hostile_code_is_cleaned_in_linear_time(code: str) -> None:
    assert clean_code(code) == code
