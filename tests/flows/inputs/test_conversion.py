"""What is wrong with a call's parameters is said before a server is asked for anything, or started."""

from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from rlm_batch import ConfigurationError, batch, chunks, sequence, sweep

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


def test_a_later_step_may_look_like_a_files_name() -> None:
    steps = ["class particle: py = 2.0", "particle.py", "SUBMIT(momentum=particle.py)"]
    assert sequence.sync(steps)[2].momentum == 2.0
