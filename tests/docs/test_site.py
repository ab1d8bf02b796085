"""The documentation's site: it has the parameters that the code declares, and a reader needs no network."""

import inspect
import re
import sys
from pathlib import Path

import pytest

import rlm_batch

from ..infra.programs import run_program
from .pages import ROOT

pytestmark = pytest.mark.full  # `.ci/run` builds the site with `make docs`


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", str(folder)]
    build = run_program(command, cwd=ROOT)
    assert build.returncode == 0, build.stderr
    return folder


def test_the_api_reference_has_the_parameters_of_flows_and_the_fields_of_blocks(site: Path) -> None:
    flows, blocks = ((site / "docs" / "api" / f"{name}.html").read_text() for name in ("flows", "blocks"))
    signatures = [inspect.signature(flow.fn) for flow in (rlm_batch.batch, rlm_batch.reap)]
    parameters = [name for signature in signatures for name in signature.parameters]
    assert [name for name in parameters if f"<strong>{name}</strong>" not in flows] == []
    fields = [*rlm_batch.LocalSandbox.model_fields, *rlm_batch.LanguageModel.model_fields]
    assert [name for name in fields if f"<strong>{name}</strong>" not in blocks] == []


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = {
        target
        for page in site.rglob("*.html")
        for target in re.findall(
            r"<(?:link|script|img|source|iframe)\b[^>]*?(?:href|src)=\"([^\"]+)\"", page.read_text()
        )
    }
    assert loaded
    assert [target for target in loaded if re.match(r"(?:https?:)?//", target)] == []
    styles = "".join(path.read_text() for path in (site / "_static").rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)\"']+", styles) == []
