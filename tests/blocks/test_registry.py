"""What somebody finds who adds a provider: each line that its entry asks for, by the file that it belongs in."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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
    for module, name in (
        (f"{entry.name}.block", entry.block_name),
        ("interpreters", interpreter),
        ("interpreters", f"Async{interpreter}"),
    ):
        line = f"from .blocks.{module} import {name} as {name}"
        assert f".blocks.{module}:{name}" in find_imports("__init__.py"), f"add to __init__.py: {line}"
        assert name in rlm_batch.__all__


@pytest.mark.parametrize("entry", ENTRIES)
def test_prefect_registers_the_block_of_an_entry(entry: ProviderEntry) -> None:
    module, name = f"{entry.name}.block", entry.block_name
    line = f"from .{module} import {name}"
    assert f".{module}:{name}" in find_imports("blocks/block_types.py"), f"add to blocks/block_types.py: {line}"
    assert entry.load_block().get_block_type_slug() == entry.slug


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_package_of_an_entry_is_in_the_wheel(entry: ProviderEntry) -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    package = f"rlm_batch.blocks.{entry.name}"
    assert package in packages, f'add to packages in pyproject.toml: "{package}"'


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_provider_has_the_name_of_its_entry(entry: ProviderEntry) -> None:
    assert entry.load_provider().provider_name == entry.name
    assert set(entry.probed_isolations) <= set(entry.isolations)
    assert entry.kinds or entry.sign_in, "an account is needed: say in `sign_in` how to get credentials"


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
