"""Tests of host modules in every provider's sandboxes: found first, and unchanged since the interpreter was created."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.driver_settings import Preparation

pytestmark = pytest.mark.anyio


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory of modules, and set a cache folder for the test."""
    tmp_path.chmod(0o755)
    monkeypatch.setenv("RLM_BATCH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "src"
    (folder / "shapes" / "data").mkdir(parents=True)
    (folder / "shapes" / "__init__.py").write_text("from .circle import AREA\n")
    (folder / "shapes" / "circle.py").write_text("AREA = 3\n")
    (folder / "shapes" / "data" / "names.txt").write_text("größer\n")
    return folder


async def test_modules_bring_their_data_and_precede_all_others_in_order(
    provider: SandboxProvider, source: Path, tmp_path: Path
) -> None:
    second = tmp_path / "second"
    (second / "shapes").mkdir(parents=True)
    (second / "shapes" / "__init__.py").write_text("AREA = 'of the second'\n")
    (second / "this.py").write_text("WHOSE = 'mine'\n")  # the standard library has a module of that name
    changed_provider = provider.with_files([str(source), str(second)])
    async with changed_provider.interpreter(
        prepare=Preparation("import shapes\nPREPARED = shapes.AREA")
    ) as interpreter:
        result = await interpreter.execute("""
import os, shapes.circle, this
data = os.path.join(os.path.dirname(shapes.__file__), "data", "names.txt")
text = open(data, encoding="utf-8").read()
SUBMIT(area=shapes.circle.AREA, prepared=PREPARED, text=text, whose=this.WHOSE)
""")
    assert result.outputs == {"area": 3, "prepared": 3, "text": "größer\n", "whose": "mine"}


@pytest.mark.local_first
async def test_an_edit_during_the_run_changes_nothing(provider: SandboxProvider, source: Path) -> None:
    changed_provider = provider.with_files([str(source)])
    before = (await changed_provider.fingerprint())["python_path"]
    (source / "shapes" / "circle.py").write_text("AREA = 4\n")
    (source / "later.py").write_text("")
    code = (
        "import importlib.util, shapes\nSUBMIT(area=shapes.AREA, later=importlib.util.find_spec('later') is not None)"
    )
    for _ in range(2):
        async with changed_provider.interpreter() as interpreter:
            assert (await interpreter.execute(code)).outputs == {"area": 3, "later": False}
    assert (await changed_provider.fingerprint())["python_path"] == before
    anew = provider.with_files([str(source)])
    assert (await anew.fingerprint())["python_path"] != before
    async with anew.interpreter() as interpreter:
        assert (await interpreter.execute(code)).outputs == {"area": 4, "later": True}
