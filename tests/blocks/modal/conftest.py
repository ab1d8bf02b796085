"""Fixtures for tests of Modal: blocks signed in to its stand-in."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rlm_batch import ModalSandbox


@pytest.fixture
def modal_sandbox(modal_standin: Any, no_process_left: None) -> Callable[..., ModalSandbox]:
    """Return a function that makes blocks signed in to Modal's stand-in. The function takes the block's fields."""
    hello = modal_standin.hello
    return partial(ModalSandbox, token_id=hello["token_id"], token_secret=hello["token_secret"])
