"""Keys have the digests that they had: a parameter that is not used leaves a key as it was."""

import json
import sys
from typing import Any

import pytest

import rlm_batch
from rlm_batch.sandbox.requests.encoded_variable import EncodedVariable
from rlm_batch.tasks.execution import assign_keys, compute_key

from .conftest import FIXTURES

KEYS = json.loads((FIXTURES / "keys.json").read_text())


@pytest.mark.parametrize("group", KEYS["counted"], ids=lambda group: ",".join(group["fingerprint"]) or "none")
def test_executions_of_a_run_have_the_keys_that_they_had(group: dict[str, Any]) -> None:
    items = [(code, variables) for code, variables in group["items"]]
    assert [execution.key for execution in assign_keys(items, group["fingerprint"])] == group["keys"]


@pytest.mark.parametrize("case", KEYS["single"])
def test_steps_chunks_and_reductions_have_the_keys_that_they_had(case: dict[str, Any]) -> None:
    encoded = {name: EncodedVariable(text.encode()) for name, text in case["encoded"].items()}
    assert compute_key(case["code"], case["variables"], encoded, case["fingerprint"]) == case["key"]


@pytest.mark.anyio
@pytest.mark.parametrize("case", KEYS["fingerprints"], ids=lambda case: case["class"])
async def test_a_block_has_the_fingerprint_that_it_had(case: dict[str, Any]) -> None:
    block = getattr(rlm_batch, case["class"])(**case["settings"])
    if case["class"] == "LanguageModel":
        assert block.fingerprint() == case["fingerprint"]
        return
    if case["commit"] is not None:
        block.pin(case["commit"])
    expected = case["fingerprint"]
    if "python" in expected:
        assert expected["python"] == "3.11.7"
        expected = {**expected, "python": sys.version.split()[0]}
    assert await block.fingerprint() == expected
