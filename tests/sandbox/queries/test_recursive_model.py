"""Tests of how a recursive model's replies are read."""

import pytest

from rlm_batch.sandbox.queries.recursive_model import find_code


@pytest.mark.parametrize("language", ["python", "py", "Python3", "repl", "ipython", "tool_code", ""])
@pytest.mark.parametrize("fence", ["```", "~~~", "````"])
def test_a_fenced_block_is_code_whatever_stands_around_it(fence: str, language: str) -> None:
    assert find_code(f"A plan.\n\n{fence}{language}\nprint(1)\n{fence}\nThat is all.") == ["print(1)"]


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
        ("```python\n\n```", []),
        ("", []),
    ],
)
def test_replies_are_read_leniently(reply: str, blocks: list[str]) -> None:
    assert find_code(reply) == blocks
