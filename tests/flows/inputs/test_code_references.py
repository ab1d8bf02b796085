"""A file in the place of code, by `@` and its path."""

import uuid
from pathlib import Path

import pytest

from rlm_batch import ConfigurationError
from rlm_batch.flows.batch import executions
from rlm_batch.flows.inputs.spilling import read_text_reference
from rlm_batch.flows.sequence import texts


def test_code_is_any_file_of_text_by_its_absolute_path_alone_or_in_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(uuid.uuid4()))  # as a worker sets it
    file, numbers = tmp_path / "slow.py", tmp_path / "numbers.jsonl"
    unknown, wide = tmp_path / "unknown.py", tmp_path / "wide.py"
    unknown.write_text("# coding: nonsense\n")
    wide.write_text("SUBMIT()", encoding="utf-16")
    numbers.write_text("1\n")
    file.write_text("SUBMIT(y=x)\n")
    decorated = "@staticmethod\ndef f(): pass\n"
    for read in (lambda text: list(executions([decorated, text], None)), lambda text: texts(["a = 1", text])):
        with pytest.raises(ConfigurationError, match="RLM_BATCH_ALLOWED_PATHS"):
            read(f"@{file}")
    monkeypatch.setenv("RLM_BATCH_ALLOWED_PATHS", str(tmp_path))
    assert list(executions([decorated, f"@{file}"], None)) == [(decorated, {}), ("SUBMIT(y=x)\n", {})]
    assert texts(["a = 1", f"@{file}\n"]) == ["a = 1", "SUBMIT(y=x)\n"]
    file.write_bytes(b"# coding: latin-1\nSUBMIT(y='\xe9')\n")
    assert read_text_reference(f"@{file}") == "# coding: utf-8\nSUBMIT(y='é')\n"
    file.write_bytes(b"\xef\xbb\xbfSUBMIT(y=x)\r\n")
    assert read_text_reference(f"@{file}") == "SUBMIT(y=x)\n"
    for place, reason in (
        ("slow.py", r"'slow\.py', which is no absolute path.* @/DIRECTORY/slow\.py"),
        ("./code/slow.txt", "no absolute path"),
        (f"{file}.old", r"the code in /.*slow\.py\.old cannot be read: No such file"),
        (str(tmp_path), "cannot be read: "),
        (str(numbers), "each of its lines is a text"),
        (str(unknown), r"unknown\.py declares an encoding that Python does not know"),
        (str(wide), r"wide\.py is UTF-16.*iconv -f UTF-16 -t UTF-8"),
    ):
        for read in (lambda text: list(executions(text, None)), read_text_reference, lambda text: texts([text])):
            with pytest.raises(ConfigurationError, match=reason) as refused:
                read(f"@{place}")
            assert "\n" not in str(refused.value)
