"""Tests of a recursive model's prompt."""

from functools import partial

from rlm_batch.sandbox.queries.recursive_model import _describe_tool  # type: ignore[reportPrivateUsage]


def test_the_prompt_hides_the_defaults_of_tools() -> None:
    def find(table: str, limit: int = 3, key: str = "sk-secret", *, timeout: float | None = None) -> str:
        """Find rows."""
        return table + key

    assert _describe_tool("find", partial(find, key="sk-other")).startswith(
        "- `find(table: str, limit: int = 3, *, key: str = ..., timeout: float | None = None) -> str`"
    )
