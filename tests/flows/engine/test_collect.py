"""The `collect` parameter: collected files are next to the ledger, in the report, and still there in later runs."""

import os
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from rlm_batch import ConfigurationError, ExecutionsFailed, Failure, batch, load_report, run_code, sequence
from rlm_batch.blocks.storage.location_parsing import parse_location
from rlm_batch.cli.main import main

pytestmark = pytest.mark.anyio

WRITE = "import os\nos.mkdir('out')\nopen('out/x.txt', 'w').write(str(x))\nopen('a b.png', 'w').close()\nSUBMIT(x)"
FAIL_ONCE = """
import os
open("half.txt", "w").write("half")
if not os.path.exists(f"{VOLUME}/tried"):
    save_to_volume("tried", "")
    1 / 0
os.symlink("/etc/passwd", "passwd.txt")
"""


def list_files(ledger: Path) -> list[str]:
    return sorted(path.relative_to(ledger).as_posix() for path in ledger.glob("files/**/*") if path.is_file())


async def test_collected_files_are_stored_beside_the_ledger_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, inputs = tmp_path / "ledger", [{"x": 1}, {"x": 2}]
    first = await batch(WRITE, inputs, collect=["out/**", "*.png"], results_path=ledger)
    names = ["files/0/a b.png", "files/0/out/x.txt", "files/1/a b.png", "files/1/out/x.txt"]
    assert list_files(ledger) == names
    assert [path for result in first for path in result.meta.collected] == [str(ledger / name) for name in names]
    assert Path(first[1].meta.collected[1]).read_text() == "2"
    # A second run reuses the files. A run that collects other files executes again and keeps the existing ones.
    again = await batch(WRITE, inputs, collect=["*.png", "out/**"], results_path=ledger)
    assert [result.meta.collected for result in again] == [result.meta.collected for result in first]
    (other,) = await batch(WRITE, inputs[:1], collect=["*.png"], results_path=ledger)
    assert other.meta.collected == (str(ledger / "files/0-2/a b.png"),)
    (plain,) = await batch(WRITE, inputs[:1], results_path=ledger)
    assert (plain.meta.collected, len(list_files(ledger))) == ((), 5)
    assert load_report(str(ledger)).results[1].meta.collected == first[1].meta.collected
    with pytest.raises(SystemExit, match="0"):
        main(["report", str(ledger)])
    assert "Report:" in capsys.readouterr().out
    page = (ledger / "report.html").read_text()
    links = re.findall(r'(?:src|href)="(\./files/1/[^"]*)"', page)
    assert links == ["./files/1/a%20b.png", "./files/1/a%20b.png", "./files/1/out/x.txt"]


@pytest.mark.full
async def test_a_successful_retry_removes_files_of_failed_attempts(tmp_path: Path) -> None:
    ledger, volume = tmp_path / "ledger", {"volume_name": f"v-{uuid.uuid4().hex[:8]}"}
    (result,) = await batch(
        [FAIL_ONCE],
        provider_options=volume,
        collect=["*.txt"],
        results_path=ledger,
        retries=1,
        retry_code_errors=True,
    )
    assert result.meta.attempt == 2
    assert result.meta.not_collected == ("passwd.txt is a link, and links are not followed",)
    assert [path.name for path in (ledger / "files").iterdir()] == ["0"]
    assert list_files(ledger) == ["files/0/half.txt"]
    steps = await sequence(
        ["open('a.txt', 'w').close()", "open('b.txt', 'w').close(); 1 / 0"], collect=["*.txt"], on_failure="return"
    )
    assert isinstance(steps[1], Failure)
    assert [Path(path).parts[-2:] for step in steps for path in step.meta.collected] == [("0", "a.txt"), ("1", "b.txt")]


async def test_collected_files_go_to_the_results_and_a_failed_copy_keeps_the_result(tmp_path: Path) -> None:
    place = f"memory://{uuid.uuid4().hex}/job"
    (result,) = await batch([WRITE.replace("x)", "1)")], collect=["out/**"], results_path=place)
    assert result.meta.collected == (f"{place}/files/0/out/x.txt",)
    assert parse_location(result.meta.collected[0]).read_bytes() == b"1"  # type: ignore[union-attr]
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    (ledger / "files").write_text("in the way")
    (result,) = await batch(["open('a.txt', 'w').close(); SUBMIT(1)"], collect=["*.txt"], results_path=ledger)
    assert (result.output, result.meta.collected) == (1, ())
    assert "a.txt could not be written to" in result.meta.not_collected[0]


async def test_run_code_collects_files_and_refuses_patterns_outside_the_folder(tmp_path: Path) -> None:
    @flow
    async def own() -> list[str]:
        results = [await run_code("open('a.txt', 'w').close()", collect=["*.txt"]) for _ in range(2)]
        return [path for result in results for path in result.meta.collected]

    paths = await own()
    assert len(set(paths)) == 2
    assert all(Path(path).is_file() for path in paths)
    for pattern in ("/etc/passwd", "../a", ""):
        with pytest.raises(ConfigurationError, match="collect has the pattern"):
            await batch(["1"], collect=[pattern])
    with pytest.raises((ConfigurationError, ExecutionsFailed), match="collect"):
        await batch(["1"], collect="*.txt")  # type: ignore[arg-type]


async def test_other_users_cannot_read_results(results: Path, tmp_path: Path) -> None:
    code = "open('out.txt', 'w').write(text)\nSUBMIT(y=1)"
    options: Any = {"collect": ["*.txt"], "cache_results": True, "provider": "local"}
    umask = os.umask(0)
    try:
        await batch(code, [{"text": "long " * 120_000}], **options)
        await batch(code, [{"text": "short"}], results_path=str(tmp_path / "new" / "job"), **options)
    finally:
        os.umask(umask)
    for root in (results, tmp_path / "new"):
        paths = [root, *root.rglob("*")]
        assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}
    files = [path for path in results.rglob("*") if path.is_file() and "files" not in path.parts]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {".jsonl", ".json", ".sqlite"} <= {path.suffix for path in files}
    assert (results / "inputs").is_dir()
