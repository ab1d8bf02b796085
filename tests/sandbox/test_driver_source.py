"""The driver is one file for any Python from 3.9 on, with the standard library alone."""

import ast
import sys
from pathlib import Path

from rlm_batch.sandbox import driver

SOURCE = Path(driver.__file__).read_text()


def test_it_compiles_as_python_3_9() -> None:
    ast.parse(SOURCE, feature_version=(3, 9))


def test_it_imports_the_standard_library_alone() -> None:
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import):
            assert {name.name.partition(".")[0] for name in node.names} <= set(sys.stdlib_module_names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert (node.module or "").partition(".")[0] in sys.stdlib_module_names


def test_it_evaluates_no_annotation() -> None:
    """`int | None` in a signature is an error in 3.9, unless annotations are text."""
    first = next(node for node in ast.parse(SOURCE).body if isinstance(node, ast.ImportFrom))
    assert (first.module, first.names[0].name) == ("__future__", "annotations")
