"""What is wrong with a call's parameters is said before a server is asked for anything, or started."""

from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlm_batch import ConfigurationError, batch, chunks, sequence, sweep

from ..conftest import last_run

NO_SERVER = "http://127.0.0.1:9/api"  # the port of discard, where nobody answers


@pytest.mark.parametrize(
    ("flow", "parameters"),
    [
        (batch, {"code": "hello.py"}),
        (batch, {"code": (text for text in ["SUBMIT()", "hello.py"])}),
        (batch, {"code": "SUBMIT()", "prepare": "hello.py"}),
        (sweep, {"code": "hello.py", "grid": {"x": [1]}, "objective": "loss"}),
        (chunks, {"code": "SUBMIT()", "data": [1], "chunk_size": 1, "reduce": "hello.py"}),
        (sequence, {"steps": ["hello.py"]}),
    ],
    ids=["batch", "one of several", "prepare", "sweep", "reduce", "sequence"],
)
def test_a_files_name_in_the_place_of_code_is_refused_before_a_server_is_needed(
    flow: Any, parameters: dict[str, Any]
) -> None:
    with temporary_settings({PREFECT_API_URL: NO_SERVER}), pytest.raises(ConfigurationError) as caught:
        flow.sync(**parameters)
    assert str(caught.value) == (
        "the code is 'hello.py', the name of a file: pass the text that is in it, as in Path('hello.py').read_text()"
    )


@pytest.mark.parametrize(
    ("flow", "parameters", "words"),
    [
        (batch, {"code": "SUBMIT()", "max_workers": "many"}, r"max_workers: Input should be a valid integer"),
        (batch, {"code": "SUBMIT()", "timeout": -1}, r"timeout: Input should be greater than 0"),
        (batch, {"code": 7, "on_failure": "ignore"}, r"code.*; on_failure: Input should be 'raise' or 'return'"),
        (sequence, {"steps": 3, "python_path": 3}, r"steps.*; python_path: Input should be a valid list"),
        (sweep, {"code": "", "grid": {}, "mounts": ["/data"]}, r"mounts: Input should be a valid dictionary"),
        (chunks, {"code": "", "data": [1], "mounts": {"/usr": "."}}, r"/usr is a place that a sandbox needs"),
        (batch, {"code": "SUBMIT('\ud800')"}, r"code has text with a lone surrogate"),
        (
            batch,
            {"code": "SUBMIT()", "inputs": [{"x": 2**64, "y": ["\ud800"]}]},
            r"inputs has text with a lone surrogate",
        ),
        (sweep, {"code": "", "grid": {"x": [1, 2**64]}}, r"grid has an integer of more than 64 bits"),
    ],
)
def test_a_value_of_a_wrong_type_or_out_of_bounds_is_refused_before_a_server_is_needed(
    flow: Any, parameters: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with temporary_settings({PREFECT_API_URL: NO_SERVER}), pytest.raises(ConfigurationError, match=words) as caught:
        flow.sync(**parameters)
    assert "\n" not in str(caught.value)
    assert not caplog.messages  # it is said once


def test_a_later_step_may_look_like_a_files_name() -> None:
    steps = ["class particle: py = 2.0", "particle.py", "SUBMIT(momentum=particle.py)"]
    assert sequence.sync(steps)[2].momentum == 2.0


@pytest.mark.anyio
async def test_integers_of_any_size_leave_the_servers_list_of_runs_readable() -> None:
    """With one of more than 64 bits in the parameters of one run, Prefect's server would list none."""
    large = 10**30
    results = await batch("SUBMIT(x=x)", [{"x": large}, {"x": -large}])
    assert [result.x for result in results] == [large, -large]
    async with get_client() as client:
        assert (await last_run(client)).parameters["inputs"].startswith("/")
