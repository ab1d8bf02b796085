"""What somebody finds who adds a provider: each line that its entry asks for, by the file that it belongs in."""

import ast
import operator
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from pydantic import SecretStr

import rlm_batch
from rlm_batch.blocks.registry import PROVIDERS, ProviderEntry

ROOT = Path(rlm_batch.__file__).parent
ENTRIES = [pytest.param(entry, id=name) for name, entry in PROVIDERS.items()]


def find_imports(path: str) -> set[str]:
    """The names that a file imports relatively, each as `.module:Name`."""
    nodes = [node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.ImportFrom)]
    return {f".{node.module}:{alias.name}" for node in nodes if node.level for alias in node.names}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_classes_of_an_entry_are_public_names(entry: ProviderEntry) -> None:
    interpreter = f"{entry.name.title()}Interpreter"
    for module, name in ((f"{entry.name}.block", entry.block_name), ("interpreters", interpreter)):
        line = f"from .blocks.{module} import {name} as {name}"
        assert f".blocks.{module}:{name}" in find_imports("__init__.py"), f"add to __init__.py: {line}"
        assert name in rlm_batch.__all__


@pytest.mark.parametrize("entry", ENTRIES)
def test_prefect_registers_the_block_of_an_entry(entry: ProviderEntry) -> None:
    module, name = f"{entry.name}.block", entry.block_name
    line = f"from .{module} import {name}"
    assert f".{module}:{name}" in find_imports("blocks/block_types.py"), f"add to blocks/block_types.py: {line}"
    assert entry.load_block().get_block_type_slug() == entry.slug


def widen(hint: Any) -> Any:
    """What a caller may pass for a field of that type: pydantic makes secrets of texts, and lists and dicts."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is SecretStr:
        return SecretStr | str
    if origin is list:
        return hint | tuple[arguments[0], ...]
    if origin is dict:
        return Mapping[arguments[0], widen(arguments[1])]  # type: ignore[reportInvalidTypeArguments]
    return reduce(operator.or_, map(widen, arguments)) if origin in (Union, UnionType) else hint


@pytest.mark.parametrize("entry", ENTRIES)
def test_type_checkers_know_the_fields_of_an_entry_as_keywords_of_its_interpreter(entry: ProviderEntry) -> None:
    settings = entry.load_settings()
    known = get_type_hints(getattr(sys.modules[settings.__module__], f"{entry.name.title()}Fields"))
    assert known == {name: widen(field.annotation) for name, field in settings.model_fields.items()}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_package_of_an_entry_is_in_the_wheel(entry: ProviderEntry) -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    package = f"rlm_batch.blocks.{entry.name}"
    assert package in packages, f'add to packages in pyproject.toml: "{package}"'


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_provider_has_the_name_of_its_entry(entry: ProviderEntry) -> None:
    assert entry.load_provider().provider_name == entry.name
    assert set(entry.probed_isolations) <= set(entry.isolations)
    assert entry.isolations or entry.sign_in, "an account is needed: say in `sign_in` how to get credentials"


def test_knowing_the_providers_imports_none_of_them() -> None:
    program = """
        import sys
        import rlm_batch.blocks.registry
        found = {name.partition(".")[0] for name in sys.modules}
        print(sorted(found & set(sys.argv[1:])), [name for name in sys.modules if name.startswith("rlm_batch.blocks.")])
        """
    sdks = ("prefect", "daytona", "modal")
    command = [sys.executable, "-c", "\n".join(line.strip() for line in program.splitlines()), *sdks]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[] ['rlm_batch.blocks.registry']"
