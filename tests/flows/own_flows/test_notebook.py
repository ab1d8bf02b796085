"""Flows in a notebook."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from rlm_batch import LocalInterpreter

from ...docs.pages import blocks

FUNCTION = """
from rlm_batch import batch

def area(width, height):
    return width * height

[result.output for result in await batch(area, [{"width": 2, "height": 3}], provider="local:none")]
"""


@pytest.mark.full
def test_a_notebook_cell_awaits_a_sweep_and_shows_progress_and_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (example,) = [block for block in blocks("ipython") if block.page == "docs/prefect.md"]
    cells = (example.text, "report.to_dataframe()", FUNCTION)
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    messages: list[Any] = []

    class Client(NotebookClient):
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            if cell_index == 0:
                messages.append(msg)
            return super().process_message(msg, cell, cell_index)

    Client(notebook, timeout=100, kernel_name="python3").execute(cwd=str(tmp_path))

    # Messages without a display id are lines of Prefect's log.
    displays = [message["content"] for message in messages if message["content"].get("transient", {}).get("display_id")]
    assert len({content["transient"]["display_id"] for content in displays}) == 1
    texts = [content["data"]["text/plain"] for content in displays]
    assert texts[0] == "0 of 4 trials succeeded"
    assert texts[-1] == "4 of 4 trials succeeded; best loss 0 in trial 2 with x=2"
    assert 2 <= len(texts) <= 5
    shown = [output.data["text/html"] for output in notebook.cells[0].outputs if "data" in output]
    assert shown.count(f'<div><progress value="4" max="4"></progress> {texts[-1]}</div>') == 1
    assert "<table" in shown[-1]
    assert "<td>" in notebook.cells[1].outputs[-1].data["text/html"]
    assert notebook.cells[2].outputs[-1].data["text/plain"] == "[6]"


@pytest.mark.full
@pytest.mark.requires("index")
def test_the_recipe_of_figures_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (recipe,) = [block for block in blocks("ipython") if block.page == "docs/cookbook.md"]
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(recipe.text)])
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(tmp_path))
    *_, first, second = [output.data["text/html"] for output in notebook.cells[0].outputs if "data" in output]
    assert first.count('<img src="data:image/png;base64,') == second.count("<img ") == 1
    assert first != second


def test_a_notebook_shows_images_of_a_sandbox_and_none_of_its_html() -> None:
    code = """
class Picture:
    def _repr_mimebundle_(self, **_): return {"image/png": 'iVBO"><script>bad()</script>', "text/html": "<b>bad</b>"}
class Page:
    def _repr_html_(self): return "<script>bad()</script>"
display(Picture()), display(Page())
SUBMIT(name="<i>")
"""
    with LocalInterpreter(isolation="none") as interpreter:
        page = interpreter.execute(code)._repr_html_()
    assert page.count("<img ") == page.count("<p>") == 1
    assert "<td>&#x27;&lt;i&gt;&#x27;</td>" in page
    assert "<script" not in page
    assert "<b>" not in page
