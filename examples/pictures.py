"""Makes the documentation's two pictures from a real run: the terminal's as SVG, the UI's as PNG by a Chromium.

    make pictures

The run is a sweep of a small search space in local sandboxes, against a Prefect server that lasts as long as this.
"""

import asyncio
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rlm_batch.deployments.server import PrefectServer

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "examples" / "pictures"
CODE = """\
import math, random

random.seed(f"{lr} {batch_size}")
loss = (math.log10(lr) + 2.3) ** 2 + (math.log2(batch_size) - 6) ** 2 / 3 + random.random() * 0.2
SUBMIT(loss=loss)
"""
COMMAND = ["rlm-batch", "sweep", "train.py", "--grid", "lr=0.001,0.01,0.1", "--grid", "batch_size=32,64,128"]
COMMAND += ["--minimize", "loss"]
# Where results are by default; those of the pictures are in a temporary directory.
USUAL = "~/.local/share/rlm-batch/results"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]


def terminal(folder: Path) -> None:
    """The command as a person types it, and what it prints."""
    (folder / "train.py").write_text(CODE)
    program = str(Path(sys.executable).with_name("rlm-batch"))
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "92"}
    done = subprocess.run(
        [program, *COMMAND[1:]], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    console = Console(record=True, width=92, file=io.StringIO(), force_terminal=True)
    console.print("[bold green]$[/] " + " ".join(COMMAND[:3]) + " \\\n    " + " ".join(COMMAND[3:]), highlight=False)
    # The line that the progress leaves behind, and then the table.
    console.print(Text.from_ansi(done.stderr.rstrip().splitlines()[-1].split("\x1b[2K")[-1]))
    console.print(Text.from_ansi(re.sub(r"Results: .*/", f"Results: {USUAL}/", done.stdout)))
    svg = console.export_svg(title="rlm-batch")
    # A picture that loads nothing: without the template's fonts from elsewhere.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    (PICTURES / "terminal.svg").write_text(svg)


def page(url: str, folder: Path) -> None:
    """The report on a run of the same code over a finer grid, as the UI shows it."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import ArtifactUpdate

    from rlm_batch import sweep

    grid = {"lr": [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1], "batch_size": [8, 16, 32, 64, 128, 256]}
    asyncio.run(sweep(CODE, grid, objective="loss", results_path=str(folder / "results")))

    async def newest() -> str:
        async with get_client() as client:
            pages = [found for found in await client.read_artifacts() if found.type == "markdown"]
            found = max(pages, key=lambda found: str(found.created))
            text = re.sub(r"/\S+/results", f"{USUAL}/{found.flow_run_id}", str(found.data))
            await client.update_artifact(found.id, ArtifactUpdate(data=text))
            return str(found.id)

    address = f"{url.removesuffix('/api')}/artifacts/artifact/{asyncio.run(newest())}"
    chromium = shutil.which("chromium") or sys.exit("there is no chromium: apt-get install chromium")
    shot = [f"--screenshot={PICTURES / 'ui.png'}", "--window-size=1280,1250", "--virtual-time-budget=30000"]
    subprocess.run(
        [chromium, *FLAGS, f"--user-data-dir={folder / 'browser'}", *shot, address],
        check=True,
        stderr=subprocess.DEVNULL,
        timeout=120,
    )


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    # Chromium may be writing to its folder when it has ended.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, PrefectServer(Path(name) / "home") as server:
        os.environ |= {"PREFECT_API_URL": server.url, "RLM_BATCH_RESULTS": f"{name}/results"}
        terminal(Path(name))
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: server.url}):
            page(server.url, Path(name))


if __name__ == "__main__":
    main()
