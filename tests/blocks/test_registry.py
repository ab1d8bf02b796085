"""The registry of providers: each entry has public names, a block and a package, and imports no provider when read."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rlm_batch
from rlm_batch import blocks
from rlm_batch.blocks.registry import PROVIDERS, ProviderEntry

ROOT = Path(rlm_batch.__file__).parent


@pytest.mark.parametrize("entry", PROVIDERS.values(), ids=PROVIDERS)
def test_an_entry_has_its_public_names_its_block_and_its_package(entry: ProviderEntry) -> None:
    interpreter = f"{entry.name.title()}Interpreter"
    for name in (entry.block_name, interpreter, f"Async{interpreter}"):
        assert name in rlm_batch.__all__, f"import {name} in __init__.py"
        assert getattr(rlm_batch, name).__name__ == name
    assert entry.block_name in blocks.__all__, f"import {entry.block_name} in blocks/block_types.py"
    assert entry.load_block() is getattr(rlm_batch, entry.block_name)
    assert entry.load_block().get_block_type_slug() == entry.slug
    assert entry.load_provider().provider_name == entry.name
    assert entry.kinds or entry.sign_in, "an account is needed: say in `sign_in` how to get credentials"
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert f"rlm_batch.blocks.{entry.name}" in packages, "add it to `packages` in pyproject.toml"


def test_listing_the_providers_imports_no_provider() -> None:
    program = """
import sys
import rlm_batch.blocks.registry
found = {name.partition(".")[0] for name in sys.modules}
print(sorted(found & set(sys.argv[1:])), [name for name in sys.modules if name.startswith("rlm_batch.blocks.")])
"""
    command = [sys.executable, "-c", program, "prefect", "daytona", "modal"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[] ['rlm_batch.blocks.registry']"
