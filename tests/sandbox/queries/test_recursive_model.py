"""Tests of reading a recursive model's replies."""

from functools import partial

import pytest

from rlm_batch.sandbox.queries.recursive_model import (
    _describe_tool,  # type: ignore[reportPrivateUsage]
    split_reply,
)


@pytest.mark.parametrize("language", ["python", "py", "Python3", "repl", "ipython", "tool_code", ""])
@pytest.mark.parametrize("fence", ["```", "~~~", "````"])
def test_a_fenced_block_is_code_whatever_stands_around_it(fence: str, language: str) -> None:
    text, blocks = split_reply(f"A plan.\n\n{fence}{language}\nprint(1)\n{fence}\nThat is all.")
    assert blocks == ["print(1)"]
    assert text == "A plan.\n\nThat is all."


@pytest.mark.parametrize(
    ("reply", "blocks"),
    [
        ("```python\na = 1\n```\nand\n```py\nprint(a)\n```", ["a = 1", "print(a)"]),
        ("```python\nprint(1)", ["print(1)"]),
        ("```python\nprint(1)```", ["print(1)"]),
        ("```\n```python\nprint(1)\n```\n```", ["print(1)"]),
        ("1. Look:\n   ```python\n   for x in y:\n       print(x)\n   ```", ["for x in y:\n    print(x)"]),
        ("````python\ntext = '''\n```\n'''\n````", ["text = '''\n```\n'''"]),
        ('```json\n{"a": 1}\n```', []),
        ("```bash\nls\n```\n```python\nprint(1)\n```", ["print(1)"]),
        ("SUBMIT(1)", []),
        ("```python\r\nprint(1)\r\n```\r\nThat is all.", ["print(1)\r"]),
        ("```x = 1```\n```python\nprint(1)\n```", ["print(1)"]),
        ("```python\n\n```", []),
        ("", []),
    ],
)
def test_replies_are_read_leniently(reply: str, blocks: list[str]) -> None:
    assert split_reply(reply)[1] == blocks


@pytest.mark.parametrize(
    "reply",
    [
        "`" * 1_000_000,
        "```" + "a" * 1_000_000,
        "```python\n" + "`" * 1_000_000 + "x",
        "```python\n" + "`" * 500_000 + " " * 500_000 + "x",
        "```python\n" + "``` x\n" * 100_000,
        "```a\n" * 100_000,
    ],
    ids=["backticks", "language", "content", "spaces", "fences", "nested fences"],
)
@pytest.mark.timeout(60)  # quadratic time would be hours
def test_a_hostile_reply_is_read_in_linear_time(reply: str) -> None:
    assert split_reply(reply)[1] == []


def test_the_prompt_hides_the_defaults_of_tools() -> None:
    def find(table: str, limit: int = 3, key: str = "sk-secret", *, timeout: float | None = None) -> str:
        """Find rows."""
        return table + key

    assert _describe_tool("find", partial(find, key="sk-other")).startswith(
        "- `find(table: str, limit: int = 3, *, key: str = ..., timeout: float | None = None) -> str`"
    )
