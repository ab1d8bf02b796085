"""Modal's stand-in, and blocks that are signed in to it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rlm_batch import ModalSandbox


@pytest.fixture
def modal_sandbox(modal_standin: Any, no_process_left: None) -> Callable[..., ModalSandbox]:
    """Makes blocks that are signed in to the stand-in for Modal; fields are keywords."""
    hello = modal_standin.hello
    return partial(ModalSandbox, token_id=hello["token_id"], token_secret=hello["token_secret"])
