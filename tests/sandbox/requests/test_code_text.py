"""Tests of the indent and the syntax tree of code."""

import ast
from typing import Any

import pytest

from rlm_batch.sandbox.model_reply import read_program
from rlm_batch.sandbox.requests.code_text import remove_indent

# In a program, these lines follow "if True:". Each one sets `s`.
INDENTED = {
    "a string with lines of blanks": "\n    s = '''a\n   \n       \n    b  \n'''\n",
    "a string that is less indented": '    s = """a\nb"""\n',
    "bytes": "    s = b'''a\n   \n    b'''\n",
    "an f-string": "    x = 1\n    s = f'''a\n   \n    b {{\n    {\n    x=}'''\n",
    "a string with a backslash": "    s = 'a\\\n    b'\n",
    "a docstring": "    class C:\n        '''One\n   \n        two'''\n    s = C.__doc__\n",
    "tabs": "\tif True:\n\t\ts = '''a\n\t\tb\tc'''\n",
    "CR LF": "\r\n    s = '''a\r\n   \r\n    b'''\r\n",
    "a form feed and a line separator": "    s = '''a\x0c    b\u2028    c\n    d'''\n",
    "brackets": "    s = [\n  1,\n2,\n    ]\n",
    "a continued line": "    s = 1 + \\\n2\n",
    "comments": "        # first\n    s = 1\n# last\n",
}


@pytest.mark.parametrize("code", INDENTED.values(), ids=INDENTED)
def test_indented_code_keeps_its_strings(code: str) -> None:
    expected: dict[str, object] = {}
    cleaned: dict[str, object] = {}
    exec("if True:\n" + code, expected)
    exec(remove_indent(code), cleaned)
    assert cleaned["s"] == expected["s"]


def test_code_without_a_common_indent_is_unchanged() -> None:
    for code in (
        "\ns = '''a\n   \nb'''\n",
        "  # a comment\ns = '''a\n  b'''\n",
        "    s = 1\nt = 2\n",
        "        if True:\n            s = 1\n    t = 2\n",
        "s = 'a\ufeffb   '   \n",
    ):
        assert remove_indent(code) == code
    assert remove_indent("  s = (1\n  t = 2\n") == "s = (1\nt = 2\n"  # Python reports line 1 and its bracket.


def test_code_is_parsed_again_after_an_error_of_cpython_with_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Any] = [SystemError("AST constructor recursion depth mismatch")] * 3
    parse = ast.parse

    def fail_first(code: str) -> ast.Module:
        if results:
            raise results.pop()
        return parse(code)

    monkeypatch.setattr(ast, "parse", fail_first)
    assert read_program("Here:\n```python\nx = 1\n```") == "\n\nx = 1\n"
    assert not results
