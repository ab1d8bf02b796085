"""A program that makes the documentation's pictures from real runs: the terminal's as SVG, the UI's as PNG.

`make pictures` runs it. `rlm-batch up` starts the server and the worker, in a temporary home. The pictures show a usual
results directory and host name instead of this machine's.
"""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling
from rich.console import Console
from rich.text import Text

from ..infra.waiting import wait_until
from ..infra.wrong_answer import ORDERS, QUESTION, script_wrong_answer
from ..standins.openai_chat import ChatServer
from .chromium import Chromium

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
CODE = """\
import math, random

random.seed(f"{lr} {width}")
loss = (math.log10(lr) + 2.3) ** 2 + (math.log2(width) - 6) ** 2 / 3 + random.random() * 0.2
SUBMIT(loss=loss)
"""
SLOW_CODE = """\
import math, time

for epoch in range(3):
    loss = (math.log10(lr) + 2.3) ** 2 + (math.log2(width) - 6) ** 2 / 3 + 2 / (epoch + 1)
    print(f"epoch {epoch}: loss {loss:.3f}")
    time.sleep(2)
SUBMIT(loss=loss)
"""
LASTING_CODE = "import time\n\ntime.sleep(300)\n"
COMMAND = ["sweep", "train.py", "--grid", "lr=0.001,0.01,0.1", "--grid", "width=32,64,128", "--minimize", "loss"]
OWN_DEPLOYMENT = ["deploy", "sweep", "train.py", "--grid", "lr=0.0003,0.001,0.003,0.01,0.03,0.1"]
OWN_DEPLOYMENT += ["--grid", "width=8,16,32,64,128,256", "--minimize", "loss", "--name", "learning-rate"]
USUAL_RESULTS = "~/.local/share/rlm-batch/results"
USUAL_HOST = "laptop"
WIDTH = 1280
# JavaScript that replaces private texts everywhere on a page.
REPLACE = """
(pairs => {
  document.body.normalize();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) for (const [from, to] of pairs)
    if (walk.currentNode.data.includes(from)) walk.currentNode.data = walk.currentNode.data.replaceAll(from, to);
})
"""


def take_terminal(folder: Path) -> None:
    """Make the picture of a typed command and its output."""
    done = run_command(folder, COMMAND, {"FORCE_COLOR": "1", "COLUMNS": "92"})
    console = Console(record=True, width=92, file=io.StringIO(), force_terminal=True)
    words = ["rlm-batch", *COMMAND]
    console.print("[bold green]$[/] " + " ".join(words[:3]) + " \\\n    " + " ".join(words[3:]), highlight=False)
    # The last line of the progress, and then the table.
    console.print(Text.from_ansi(done.stderr.rstrip().splitlines()[-1].split("\x1b[2K")[-1]))
    console.print(Text.from_ansi(re.sub(r"(Results of .*: ).*/", rf"\1{USUAL_RESULTS}/", done.stdout)))
    svg = console.export_svg(title="rlm-batch")
    # Remove the template's remote fonts, so that the picture loads nothing.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    (PICTURES / "terminal.svg").write_text(svg)


def take_turns(folder: Path) -> None:
    """Make the pictures of a recursive model's turns, in which one sub-answer is wrong."""
    (folder / "orders.txt").write_text(ORDERS)
    words = ["rlm", QUESTION, "--context-file", "orders.txt", "--language-model", "openai/gpt-4o-mini"]
    with ChatServer() as chat:
        script_wrong_answer(chat)
        environment = {"OPENAI_API_KEY": "sk-stand-in", "OPENAI_API_BASE": chat.url}
        run_command(folder, [*words, "--record", "full", "--results-path", "late"], environment)
    run_command(folder, ["report", "late"])
    for theme in ("dark", "light"):
        with Chromium(WIDTH, 1340) as page:
            page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
            page.goto((folder / "late" / "report.html").as_uri())
            page.see("Turns and queries", "11: due May 11")
            page.js("document.querySelector('.question').scrollIntoView()")
            page.screenshot(PICTURES / f"turns-{theme}.png")


def run_command(
    folder: Path, words: list[str], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `rlm-batch` in a folder and return its output."""
    command = [find_program(), *words]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=True
    )


def find_program() -> str:
    """Return the path of `rlm-batch`."""
    return str(Path(sys.executable).with_name("rlm-batch"))


class Camera:
    """A maker of pictures of a server's UI; `private` maps private texts to their replacements."""

    def __init__(self, ui: str, private: dict[str, str]) -> None:
        self._ui = ui
        self._private = [*private.items()]

    def take(
        self,
        name: str,
        path: str,
        height: int,
        *texts: str,
        theme: str = "dark",
        prepare: Callable[[Chromium], Any] | None = None,
    ) -> None:
        """Save a picture of the page at `path`, once the page shows the texts and `prepare` has run."""
        with Chromium(WIDTH, height) as page:
            page.goto(f"{self._ui}/settings")
            page.see("Settings")
            page.js(f"localStorage.setItem('color-scheme', {json.dumps(json.dumps(theme))})")
            page.goto(f"{self._ui}/{path}")
            page.see(*texts)
            if prepare is not None:
                prepare(page)
            time.sleep(3)  # let animations end
            page.js(f"{REPLACE}({json.dumps(self._private)})")
            picture = page.screenshot(PICTURES / f"{name}.png")
        print(f"{name}.png: {picture.stat().st_size / 1000:.0f} kB", flush=True)


def enlarge_code(page: Chromium) -> None:
    """Enlarge the code's field, as a user does by dragging its corner."""
    page.js("document.querySelector('textarea').rows = 6")


def take_ui(client: SyncPrefectClient, camera: Camera, folder: Path) -> None:
    """Make the pictures of a deployment and its runs: scheduled, running, completed and cancelled."""
    run_command(folder, OWN_DEPLOYMENT)
    deployment = client.read_deployment_by_name("rlm-sweep/learning-rate").id

    def start(**parameters: Any) -> Any:
        return client.create_flow_run_from_deployment(deployment, parameters=parameters).id

    def has_ended(run: Any) -> bool:
        state = client.read_flow_run(run).state
        return state is not None and state.is_final()

    def count_trials(run: Any) -> int:
        return len(client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run]))))

    done = start()
    wait_until(lambda: has_ended(done))
    (report,) = (item for item in client.read_artifacts() if item.type == "markdown" and item.flow_run_id == done)
    for theme in ("dark", "light"):
        address = f"artifacts/artifact/{report.id}"
        camera.take(f"report-{theme}", address, 1310, "Trials, the best first", theme=theme)

    running = start(code=SLOW_CODE)
    wait_until(lambda: count_trials(running) >= 8)
    camera.take("running", f"runs/flow-run/{running}", 1100, "trial 4", "epoch 0")
    client.set_flow_run_state(running, Cancelling(), force=True)
    wait_until(lambda: has_ended(running))

    cancelled = start(code=LASTING_CODE)
    wait_until(lambda: count_trials(cancelled) == 4)
    client.set_flow_run_state(cancelled, Cancelling(), force=True)
    wait_until(lambda: has_ended(cancelled))
    camera.take("cancelled", f"runs/flow-run/{cancelled}", 1120, "the results so far are in", "was cancelled")

    address = f"deployments/deployment/{deployment}/run"
    camera.take("form", address, 1046, "max_workers", prepare=enlarge_code)
    camera.take("deployments", "deployments", 880, "learning-rate")


@contextmanager
def run_up(folder: Path) -> Iterator[str]:
    """Run `rlm-batch up` and yield the URL of its server's API."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [find_program(), "up", "--port", str(port)], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        if not any(line.startswith("Up, with") for line in process.stdout):
            sys.exit("rlm-batch up has ended")
        yield f"http://127.0.0.1:{port}/api"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


def main() -> None:
    """Make all pictures."""
    PICTURES.mkdir(exist_ok=True)
    # Chromium may still write to its folder after its end.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder, results = Path(name), f"{name}/results"
        (folder / "train.py").write_text(CODE)
        os.environ |= {"PREFECT_HOME": f"{name}/home", "RLM_BATCH_RESULTS": results}
        with run_up(folder) as url, temporary_settings({PREFECT_API_URL: url}):
            os.environ["PREFECT_API_URL"] = url
            take_terminal(folder)
            take_turns(folder)
            private = {results: USUAL_RESULTS, socket.gethostname(): USUAL_HOST}
            with get_client(sync_client=True) as client:
                take_ui(client, Camera(url.removesuffix("/api"), private), folder)


if __name__ == "__main__":
    main()
