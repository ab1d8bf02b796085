"""Programs and commands of the documentation: they run as written."""

import linecache
import pkgutil
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..infra.scripted_turns import make_script
from ..standins.git_server import GitServer
from ..standins.openai_chat import ChatServer
from .pages import PAGES, ROOT, Block, blocks, commands, read_page

# `test_cookbook.py` runs the blocks of tests with pytest, and `test_coming_from.py` the programs of its page.
PROGRAMS = [
    block
    for block in blocks("python")
    if "rlm_batch" in block.text and "def test_" not in block.text and block.page != "docs/coming-from.md"
]
CODE = [block for block in blocks("python") if "rlm_batch" not in block.text]
REVIEW = '{"stars": 3, "complaints": ["slow service"]}'  # the answer to a query with a format
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
pytestmark = pytest.mark.timeout(600)  # importing LiteLLM and DSPy takes minutes on a busy machine

# Pages for beginners; the full tests run the programs of the other pages.
FIRST_PAGES = ("README.md", "docs/start.md", "docs/cookbook.md")
WITH_NEEDS = [
    pytest.param(
        block,
        marks=[
            *([] if block.page in FIRST_PAGES and "scikit-learn" not in block.text else [pytest.mark.full]),
            *([pytest.mark.requires("index")] if re.search("scikit-learn|humanize", block.text) else []),
            *([pytest.mark.requires("namespaces")] if re.search("Daytona|Modal", block.text) else []),
            *([pytest.mark.requires("podman")] if "container" in block.text.lower() else []),
        ],
    )
    for block in PROGRAMS
]

FILES = {
    **{f"{name}.py": f"SUBMIT(name={name!r})" for name in ("one", "two", "load", "fit", "report")},
    "code.py": "SUBMIT(y=x * x)",
    "plot.py": "open('plot.png', 'wb').write(b'PNG')",
    "size.py": "SUBMIT(size=len(open(path).read()))",
    "fetch.py": "import os; SUBMIT(y=os.environ['STAGE'] + os.environ['API_TOKEN'])",
    "check.py": "SUBMIT(passed=submitted['y'] == x * x)",
    "model.py": "SUBMIT(loss=1 / units, size=units)",
    "score.py": "SUBMIT(score=n / 1000)",
    "rows.csv": "n\n1\n2\n",
    "in.csv": "lr\n0.1\n",
    "s.jsonl": '{"n": 1}\n{"n": 2}\n',
    "space.json": '[{"units": {"low": 1, "high": 9}}, {"units": [16, 32]}]',
    "prepare.py": "import random",
    "inputs.jsonl": '{"x": 1}\n{"x": 2}\n',
    "points.csv": "lr,batch_size\n0.1,32\n0.01,64\n",
    "count.py": "save_to_volume(f'results/{chunk_id}', str(len(data))); SUBMIT(count=len(data))",
    "table.py": "save_to_volume('results/table.json', str(sum(fields['count'] for fields in results.values())))",
    "rows.jsonl": "".join(f'{{"n": {n}}}\n' for n in range(250)),
    "report.txt": "a long report\n" * 1000,
    "questions.txt": "How many orders were late?\nWho ordered most?\n",
    "questions.csv": "query,context_file,id\nHow long is it?,report.txt,a\n",
    "digits/rows.csv": "1,2\n",
    "labels.csv": "0\n",
    "train.py": "SUBMIT(loss=(lr - 0.1) ** 2 + globals().get('seed', 0) / 100)",
    "texts/one.txt": "one two",
    "src/shapes.py": "def area(r):\n    return 3 * r * r\n",
    "data/rows.csv": "1\n2\n",
}


def write_files(folder: Path) -> None:
    """Write the files that the programs and commands read."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize("program", WITH_NEEDS, ids=lambda block: f"{block.page}: {block.text.splitlines()[-1][:40]}")
def test_a_program_runs(
    program: Block,
    server: str,
    openai: ChatServer,
    account: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run a program as written; local servers replace OpenAI's models and the providers' accounts."""
    account(*(name for name in ("daytona", "modal") if name.title() in program.text))
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(tmp_path))
    monkeypatch.setenv("RLM_BATCH_VOLUMES", str(tmp_path / "volumes"))
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    script = make_script(("", "SUBMIT(answer=str(len(globals().get('context', ''))))"))
    dspy_script = make_script(("", "SUBMIT(answer=str(sum(map(population, context.split(', ')))))"), is_dspy=True)
    openai.script = lambda request: (
        REVIEW if "response_format" in request.body else script(request) or dspy_script(request)
    )
    name = f"<{program.page}>"
    # The cache lets tracebacks show the program's lines.
    linecache.cache[name] = (len(program.text), None, program.text.splitlines(keepends=True), name)
    exec(compile(program.text, name, "exec"), {"__name__": "__main__"})


def test_code_for_a_sandbox_runs_in_one() -> None:
    from rlm_batch import LocalInterpreter

    for code in CODE:
        with LocalInterpreter(isolation="none") as interpreter:
            assert interpreter.execute(code.text, {"lr": 0.01, "batch_size": 64}).loss > 0


# `test_cookbook.py`, `tests/deployments`, `tests/flows/sharding`, `tests/flows/test_shared_server_process.py` and
# `tests/cli/test_shell.py` run commands that need a port, workers, a shared server or a terminal, or change the server.
ELSEWHERE = re.compile("rlm-batch (up|worker|deploy|server|shell)|.* --shards ")
OURS = {page: [line for line in commands(page) if line.startswith("rlm-batch ")] for page in PAGES}
RUN_HERE = {page: [line for line in lines if not ELSEWHERE.match(line)] for page, lines in OURS.items()}


MOUNTING_PAGES = ("docs/files.md",)  # pages whose mounts need bubblewrap
RUN_PAGES = [
    pytest.param(
        page,
        marks=[
            *([] if page in FIRST_PAGES else [pytest.mark.full]),
            *([pytest.mark.requires("bubblewrap")] if page in MOUNTING_PAGES else []),
            *([pytest.mark.requires("pip")] if any("--packages" in line for line in lines) else []),
        ],
    )
    for page, lines in RUN_HERE.items()
    if lines
]


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return set-ups that need no network, by the pages' set-ups that they replace."""
    server = GitServer(tmp_path_factory.mktemp("served"))
    yield {"apt-get install -y graphviz": "true", "numpy": server.add_wheel("numpy")}
    server.close()


@pytest.mark.parametrize("page", RUN_PAGES)
def test_the_commands_of_a_page_run_in_order(
    page: str,
    server: str,
    account: Callable[..., None],
    openai: ChatServer,
    offline: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from rlm_batch.cli.commands import app

    account(*(name for name in ("daytona", "modal") if any(f"--provider {name}" in line for line in RUN_HERE[page])))
    results = tmp_path / "results"
    monkeypatch.setenv("RLM_BATCH_RESULTS", str(results))
    monkeypatch.setenv("RLM_BATCH_VOLUMES", str(tmp_path / "volumes"))
    if any("prune" in line for line in RUN_HERE[page]):
        monkeypatch.setenv("RLM_BATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("API_TOKEN", "secret")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    write_files(tmp_path)
    openai.script = make_script(("", "SUBMIT(answer=str(len(globals().get('context', ''))))"))
    for command in RUN_HERE[page]:
        words = [offline.get(word, word) for word in shlex.split(command)[1:]]
        if "RUN" in words:
            runs = [path for path in results.iterdir() if path.is_dir()]
            newest = str(max(runs, key=lambda path: path.stat().st_mtime))
            words = [newest if word in ("RUN", "OTHER") else word for word in words]
        status = app(words, exit_on_error=False, result_action="return_value")
        assert status in (None, 0), f"{command}: {capfd.readouterr()}"


def test_every_documented_flow_command_is_tested() -> None:
    """Check that no page's commands are skipped because of a block with another language."""
    assert sum(map(len, RUN_HERE.values())) >= 12
    assert {line.split()[1] for lines in RUN_HERE.values() for line in lines} >= {
        *("batch", "sweep", "chunks", "sequence", "rlm", "reap", "report", "volume", "doctor")
    }
    assert {block.page for block in blocks("")} == set(), "a block of code without a language"


def test_names_in_the_pages_exist() -> None:
    """Look for commands, targets, deployments, extras and files, in blocks and in sentences."""
    from rlm_batch.cli.commands import app

    made: dict[str, Any] = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())
    flows = {entry["entrypoint"]: pkgutil.resolve_name(entry["entrypoint"]) for entry in made["deployments"]}
    deployments = {f"{flows[entry['entrypoint']].name}/{entry['name']}" for entry in made["deployments"]}
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    rooms = "cli|flows|tasks|blocks|sandbox|deployments|tests|benchmarks|examples|docs"
    missing: list[str] = []
    for page in PAGES:
        for command in OURS[page]:
            app.parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)
        text, lines = read_page(page), "\n".join(commands(page))
        files = re.findall(rf"(?<![\w/.])((?:{rooms})/[\w./-]*\w\.\w+)", text)
        files += re.findall(rf"`((?:{rooms})/[\w./-]*)`", text)
        files += re.findall(rf" ((?:{rooms})/[\w./-]*)", lines)
        unknown = [name for name in re.findall(r"`rlm-batch ([a-z]+)", text) if name not in app]
        unknown += [name for name in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE) if name not in targets]
        unknown += [name for name in re.findall(r"deployment run (\S+)", lines) if name not in deployments]
        unknown += [name for name in files if not (ROOT / name).exists()]
        missing += [f"{page}: {name}" for name in unknown]
    assert missing == []


def test_every_extra_is_in_the_documentation() -> None:
    extras = {name for page in PAGES for name in re.findall(r"pip install '\.\[(\w+)\]'", read_page(page))}
    assert extras == {*PROJECT["optional-dependencies"]} - {"dev", "docs", "ray"}
