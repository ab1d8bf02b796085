"""The command line's options are the flows' parameters: names, defaults, descriptions, and what may be None."""

import inspect
import subprocess
import sys
from types import NoneType
from typing import Any, get_args

import pytest
from cyclopts import App

from rlm_batch.blocks.registry import PROVIDERS
from rlm_batch.cli.commands import app
from rlm_batch.cli.parameter_options import LEFT_OUT, OPTION_NAMES
from rlm_batch.flows.batch import batch
from rlm_batch.flows.chunks import chunks
from rlm_batch.flows.parameters import SharedParameters, field_of
from rlm_batch.flows.reap import reap
from rlm_batch.flows.rlm import rlm
from rlm_batch.flows.sequence import sequence
from rlm_batch.flows.sweep import sweep

FLOWS: dict[str, Any] = {
    "batch": batch,
    "sweep": sweep,
    "chunks": chunks,
    "sequence": sequence,
    "rlm": rlm,
    "reap": reap,
}
# What a command takes in another form: files of code, a grid and a space in words, and one option for each direction.
WORDS = {"code", "steps", "query", "grid", "space", "objective", "direction", *LEFT_OUT}
OPTIONS_ALONE = {"isolation", "minimize", "maximize", "grid", "space", "show_output", "json"}
SETTINGS = {name for entry in PROVIDERS.values() for name in entry.load_settings().list_run_settings()}
PAIRS = {"mounts": "TARGET=PATH", "tools": "NAME=MODULE:FUNCTION"}  # what a dict is on the command line
NEEDED = {"rlm": ["--language-model", "m"], "reap": []}


def flow_parameters(name: str) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(FLOWS[name].fn).parameters
    return {OPTION_NAMES.get(name, name): value for name, value in parameters.items() if name not in WORDS}


def options(name: str) -> dict[str, Any]:
    """The command's options, by their parameters' names."""
    command: App = app[name]
    return {item.field_info.name: item for item in command.assemble_argument_collection() if item.name.startswith("--")}


@pytest.mark.parametrize("name", FLOWS)
def test_a_command_has_an_option_for_each_parameter_of_its_flow_and_no_other(name: str) -> None:
    found = set(options(name)) - OPTIONS_ALONE
    assert found - SETTINGS == set(flow_parameters(name)) - SETTINGS


@pytest.mark.parametrize("name", FLOWS)
def test_a_command_with_sandboxes_has_an_option_for_each_setting_that_a_run_may_have(name: str) -> None:
    assert set(options(name)) >= (SETTINGS if name != "reap" else set())
    assert not {"repo_token", "api_key", "token_id", "environment", "api_url", "limit_name"} & set(options(name))


@pytest.mark.parametrize("name", FLOWS)
def test_an_option_has_its_parameters_default(name: str) -> None:
    found = options(name)
    for option, parameter in flow_parameters(name).items():
        assert found[option].field_info.default == parameter.default, option


@pytest.mark.parametrize("name", FLOWS)
def test_an_option_that_flows_share_says_of_itself_what_the_form_says(name: str) -> None:
    found = options(name)
    shared = {OPTION_NAMES.get(item, item) for item in SharedParameters.__annotations__}
    for option, parameter in flow_parameters(name).items():
        field = field_of(parameter.annotation)
        assert field is not None
        if option in shared and name != "reap" and (name, option) != ("rlm", "language_model"):
            form = f": {PAIRS[option]}, once for each" if option in PAIRS else ""
            assert found[option].parameter.help == f"{field.description}{form}.", option


@pytest.mark.parametrize("name", FLOWS)
def test_none_can_be_said_wherever_a_flow_takes_it(name: str) -> None:
    for option, parameter in flow_parameters(name).items():
        kind = get_args(parameter.annotation)[0]
        if NoneType not in get_args(kind) or str in get_args(kind):
            continue
        arguments = [name, *([] if name == "reap" else ["x"]), *NEEDED.get(name, [])]
        _, bound, _ = app.parse_args(
            [*arguments, f"--{option.replace('_', '-')}", "none"], exit_on_error=False, print_error=False
        )
        assert bound.arguments.get(option, bound.kwargs.get(option)) is None, option


PROGRAM = """
import sys
from rlm_batch.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    sys.exit("Prefect was imported" if "prefect" in sys.modules else end.code)
"""


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--version"], 0, ""),
        (["batch", "--help"], 0, ""),
        (["batch", "x.py", "--no-such-option"], 2, "--no-such-option"),
        (
            ["batch", "x.py", "--max-workers", "0", "--retries", "-1"],
            2,
            (
                "max_workers: Input should be greater than or equal to 1; "
                "retries: Input should be greater than or equal to 0"
            ),
        ),
    ],
)
def test_what_needs_no_flow_does_not_wait_for_prefects_import(arguments: list[str], status: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stderr
    assert said in done.stderr


@pytest.mark.parametrize(
    ("word", "message"),
    [("zip", "it is a column and its type, as in zip=str"), ("zip=text", "no type 'text', but int, float, bool")],
)
def test_a_word_that_is_no_column_with_its_type_is_refused_with_those_that_there_are(word, message, tmp_path, run):
    (tmp_path / "in.csv").write_text("zip\n01234\n")
    (tmp_path / "code.py").write_text("SUBMIT(zip=zip)")
    done = run("batch", "code.py", "--inputs", "in.csv", "--types", word)
    assert done.returncode == 2
    assert message in done.stderr
