"""The command's options: names, defaults, descriptions and None values are those of the flows' parameters."""

import inspect
import sys
from io import StringIO
from types import NoneType
from typing import Any, get_args

import pytest
from rich.console import Console

from rlm_batch.blocks.registry import PROVIDERS
from rlm_batch.cli.commands import app
from rlm_batch.cli.option_names import OPTIONS_BY_PARAMETER
from rlm_batch.cli.parameter_options import LEFT_OUT
from rlm_batch.flows.batch import batch
from rlm_batch.flows.check import check
from rlm_batch.flows.chunks import chunks
from rlm_batch.flows.parameters import GROUPS, find_field, find_form
from rlm_batch.flows.reap import reap
from rlm_batch.flows.rlm import rlm
from rlm_batch.flows.sequence import sequence
from rlm_batch.flows.sweep import sweep

from ..infra.programs import run_program

FLOWS: dict[str, Any] = {
    "batch": batch,
    "sweep": sweep,
    "check": check,
    "chunks": chunks,
    "sequence": sequence,
    "rlm": rlm,
    "reap": reap,
}
# Parameters that a command takes in another form: files of code, grids and spaces as text, an option per direction.
WORDS = {"code", "steps", "query", "grid", "space", "objective", "direction", "on_turn", *LEFT_OUT}
OPTIONS_ALONE = {
    "env",
    "isolation",
    "minimize",
    "maximize",
    "grid",
    "space",
    "show_output",
    "json",
    "usage",
    "name",
    "tag",
}
SETTINGS = {name for entry in PROVIDERS.values() for name in entry.load_settings().list_run_settings()}
COMMANDS = [
    *("batch", "sweep", "chunks", "sequence", "rlm", "check", "report", "rerun", "shell", "runs", "prune"),
    *("deploy", "up", "worker", "server", "volume", "snapshot", "reap", "doctor"),
]
NEEDED = {"rlm": ["--language-model", "m"], "check": ["check.py"]}


@pytest.mark.parametrize("name", FLOWS)
def test_a_commands_options_are_the_parameters_of_its_flow(name: str) -> None:
    options = {
        item.field_info.name: item for item in app[name].assemble_argument_collection() if item.name.startswith("--")
    }
    parameters = {
        OPTIONS_BY_PARAMETER.get(name, name): value
        for name, value in inspect.signature(FLOWS[name].fn).parameters.items()
        if name not in WORDS and not find_form(value.annotation).is_argument
    }
    assert set(options) - OPTIONS_ALONE - SETTINGS == set(parameters) - SETTINGS
    assert set(options) >= (SETTINGS if name != "reap" else set())
    assert not {"repo_token", "api_key", "token_id", "environment", "api_url", "limit_name"} & set(options)
    nullable: list[str] = []
    for option, parameter in parameters.items():
        assert options[option].field_info.default == (None if parameter.default == {} else parameter.default), option
        field = find_field(parameter.annotation)
        assert field is not None
        text = find_form(parameter.annotation).help or field.description
        assert text is not None
        if name != "reap":
            first_sentence = text.partition(". ")[0].removesuffix(".")
            assert (options[option].parameter.help or "").removesuffix(" (repeatable)") == first_sentence, option
        # A type such as `Code` is `str` with a note on its content. The option of a schema takes a file's name.
        kinds = [getattr(kind, "__origin__", kind) for kind in get_args(get_args(parameter.annotation)[0])]
        if NoneType in kinds and str not in kinds and option != "output_type":
            nullable.append(option)
    words = [word for option in nullable for word in (f"--{option.replace('_', '-')}", "none")]
    command = [name, *([] if name == "reap" else ["x"]), *NEEDED.get(name, []), *words]
    _, bound, _ = app.parse_args(command, exit_on_error=False, print_error=False)
    values = {**bound.arguments, **bound.kwargs}
    assert {option: values.get(option) for option in nullable} == dict.fromkeys(nullable)


def read_help(*words: str) -> dict[str, dict[str, str]]:
    """Return the descriptions that a command's help shows, by group and by option or command."""
    output = StringIO()
    app.help_print([*words], console=Console(file=output, width=250))
    groups: dict[str, dict[str, str]] = {}
    entries: dict[str, str] = {}
    for line in output.getvalue().splitlines():
        if line.startswith("\u256d"):  # the upper left corner of a group's frame
            entries = groups.setdefault(line.strip("\u256d\u2500\u256e "), {})
        elif line.startswith("\u2502"):  # the left side of a frame
            label, _, text = line.strip("\u2502* ").partition("  ")
            assert label.split()[0] not in entries
            entries[label.split()[0]] = text.strip()
    return groups


@pytest.mark.parametrize("name", ["batch", "sweep", "chunks", "sequence", "rlm"])
def test_help_shows_the_ten_most_common_options_first_and_each_option_in_one_group(name: str) -> None:
    arguments, common, *others = read_help(name).items()
    assert (arguments[0], common[0], len(common[1])) == ("Arguments", "Common options", 10)
    assert {"--provider", "--packages", "--timeout"} <= common[1].keys()
    titles = [title for title, _ in others]
    own = [name.title()] if name != "sequence" else []
    assert titles == [*own, *GROUPS, *(provider.title() for provider in PROVIDERS)]
    entries = [entry for _, group in (arguments, common, *others) for entry in group.items()]
    shown = [option for option, _ in entries]
    assert sorted(shown) == sorted(item.name for item in app[name].assemble_argument_collection())
    assert [option for option, text in entries if not text] == []


def test_help_on_a_deployment_starts_with_the_options_of_the_deployment() -> None:
    groups = read_help("deploy", "batch")
    assert list(groups)[:3] == ["Arguments", "Deployment", "Common options"]
    assert groups["Deployment"].keys() == {"--name", "--cron", "--timezone", "--work-pool"}


def test_a_setting_that_differs_between_providers_is_described_for_each() -> None:
    limits = read_help("batch")["Limits"]
    assert limits["--memory-mib"].endswith(
        "MiB of memory of each process (local); MiB of memory of the whole sandbox (container, modal) "
        "[default: 4096 (local); 2048 (container)]"
    )
    assert "[default: 86400 (local, container, daytona); 14400 (modal)]" in limits["--lifetime"]


def test_help_lists_the_commands_in_the_order_of_use_in_one_line_each() -> None:
    commands = {name: text for name, text in read_help()["Commands"].items() if not name.startswith("-")}
    assert list(commands) == COMMANDS
    assert [text for text in commands.values() if not text or len(text) >= 70] == []


PROGRAM = """
import sys
from rlm_batch.cli.main import main
for words in sys.stdin:
    try:
        main(words.split())
    except SystemExit as end:
        print(end.code, file=sys.stderr)
assert "prefect" not in sys.modules
"""


def test_help_and_usage_errors_do_not_import_prefect() -> None:
    commands = {
        "--version": "0\n",
        "batch --help": "0\n",
        "batch x.py --no-such-option": "--no-such-option",
        f"batch {__file__} --max-workers 0 --retries -1": (
            "--retries is -1: it should be greater than or equal to 0; "
            "--max-workers is 0: it should be greater than or equal to 1\n2\n"
        ),
        **{
            f"{command} nosuch.py": "rlm-batch: [Errno 2] No such file or directory: 'nosuch.py'\n2\n"
            for command in ("batch", "sweep", "chunks", "sequence")
        },
    }
    words = "\n".join(commands)
    done = run_program([sys.executable, "-c", PROGRAM], input=words)
    assert done.returncode == 0, done.stderr
    for text in commands.values():
        assert text in done.stderr
