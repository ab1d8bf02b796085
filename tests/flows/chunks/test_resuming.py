"""Resumed chunked jobs: the same results_path runs only the chunks that have no result there."""

import asyncio
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import Volume, VolumeError, chunks, reap
from rlm_batch.tasks.ledger.ledger import Ledger

from ...infra.waiting import wait_until
from .job import THREE

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("volumes")]

WRITE_AND_DRAW = """
import os
if VOLUME:
    save_to_volume(f"{chunk_id}.txt", str(data))
SUBMIT(random=os.urandom(8).hex())
"""
DRAW = "import os\nSUBMIT(random=os.urandom(8).hex(), ids=sorted(results))"


def list_draws(report: Any) -> dict[str, str]:
    """Return the random text that each chunk submitted; a resumed chunk keeps its text."""
    return {name: outcome.random for name, outcome in report.results.items()}


@pytest.mark.parametrize("volume_name", [None, "once"])
async def test_a_complete_job_runs_nothing_and_reads_its_reduction(tmp_path, volume_name):
    options: dict[str, Any] = {"volume_name": volume_name, "reduce": DRAW, "results_path": str(tmp_path / "ledger")}
    first = await chunks(WRITE_AND_DRAW, THREE, **options)
    again = await chunks(WRITE_AND_DRAW, THREE, **options)
    assert list_draws(again) == list_draws(first)
    assert again.reduction.outputs == first.reduction.outputs
    assert [again[n].meta.files for n in THREE] == [(f"{n}.txt",) if volume_name else () for n in THREE]
    elsewhere = await chunks(WRITE_AND_DRAW, THREE, volume_name=volume_name)
    assert not set(list_draws(elsewhere).values()) & set(list_draws(first).values())


@pytest.mark.full
async def test_a_ledger_in_a_bucket_records_complete_chunks(s3):
    options: dict[str, Any] = {"volume_name": "bucket", "reduce": DRAW, "results_path": "s3://results/chunks"}
    first = await chunks(WRITE_AND_DRAW, THREE, **options)
    again = await chunks(WRITE_AND_DRAW, {**THREE, 3: [1]}, **options)
    assert list_draws(again) == {**list_draws(first), "3": again[3].random}
    assert again.reduction.ids == ["0", "1", "2", "3"]
    last = await chunks(WRITE_AND_DRAW, {**THREE, 3: [1]}, **options)
    assert list_draws(last) == list_draws(again)
    assert last.reduction.outputs == again.reduction.outputs


async def test_changed_chunks_and_their_reduction_are_rerun(tmp_path):
    options: dict[str, Any] = {"volume_name": "changed", "reduce": DRAW, "results_path": str(tmp_path / "ledger")}
    first = await chunks(WRITE_AND_DRAW, THREE, **options)
    again = await chunks(WRITE_AND_DRAW, {**THREE, 1: [4, 5, 7]}, **options)
    assert [name for name, text in list_draws(again).items() if text != first[name].random] == ["1"]
    assert again.reduction.random != first.reduction.random
    assert Volume("changed").get("1.txt") == b"[4, 5, 7]"
    other = await chunks(WRITE_AND_DRAW + "\n# changed", THREE, **options)
    assert not set(list_draws(other).values()) & set(list_draws(again).values())


async def test_only_failed_chunks_are_rerun(tmp_path):
    code = "if data == 2 and not list_volume('go'): raise ValueError\n" + WRITE_AND_DRAW
    jobs = {"a": 1, "b": 2, "c": 3}
    options: dict[str, Any] = {"volume_name": "failed", "reduce": DRAW, "results_path": str(tmp_path / "ledger")}
    first = await chunks(code, jobs, **options, on_failure="return")
    Volume("failed").put("go/on", "")
    again = await chunks(code, jobs, **options)
    assert [again[name].random for name in "ac"] == [first[name].random for name in "ac"]
    assert again.reduction.ids == ["a", "b", "c"]


@pytest.mark.full
def test_a_killed_job_resumes_only_incomplete_chunks(tmp_path, server, volumes):
    """Kill the host with SIGKILL in the middle, and run its program again."""
    data, ledger = tmp_path / "rows.jsonl", tmp_path / "ledger"
    data.write_text("".join(json.dumps({"n": n, "text": "word " * (n % 7)}) + "\n" for n in range(400)))
    program = f"""
import asyncio, sys
from rlm_batch import chunks
code = '''
import os, time
while int(chunk_id) >= 12 and not os.path.exists(VOLUME + "/go"):
    time.sleep(0.05)
save_to_volume(f"words/{{chunk_id}}", str(sum(len(row["text"].split()) for row in data)))
SUBMIT(rows=len(data))
'''
reduce = '''
SUBMIT(words=sum(int(load_from_volume(path)) for path in list_volume("words")),
       rows=sum(fields["rows"] for fields in results.values()))
'''
report = asyncio.run(chunks(code, data={str(data)!r}, chunk_size=10, volume_name="killed", max_workers=4,
                            reduce=reduce, results_path={str(ledger)!r}))
print(report.reduction.words, report.reduction.rows, len(report.results))
"""

    def count_lines() -> int:
        return sum(1 for _ in Ledger(ledger).read_lines())

    host = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: count_lines() == 12)
        # All four sandboxes are open and wait for the file, so none is being created or removed.
        wait_until(lambda: len(list(Path(tempfile.gettempdir()).glob("rlm-batch-*/sandbox.json"))) == 4)
    finally:
        host.kill()
        host.wait()
    assert count_lines() == 12
    asyncio.run(reap())
    Volume("killed").put("go", "")
    again = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    words = sum(n % 7 for n in range(400))
    assert again.stdout.split() == [str(words), "400", "40"]
    assert count_lines() == 12 + 28 + 1


async def test_any_chunk_result_is_read_from_the_ledger_and_reduced(tmp_path):
    code = """
import math, os
value = 1.0
for _ in range(99):
    value = [value]
large = dict(quotes='"' * 500_000, numbers=[1] * 20_000) if chunk_id == "large" else {}
SUBMIT(value=value if chunk_id == "deep" else data, random=os.urandom(8).hex(), **large)
"""
    jobs = {"infinite": [math.inf, 1.0], "nan": [math.nan], "deep": 0, "large": 0}
    reduce = (
        "SUBMIT(seen={name: str(fields['value']) for name, fields in results.items()}, back=results['nan']['value'])"
    )
    ledger = str(tmp_path / "ledger")
    first = await chunks(code, jobs, volume_name="nan", reduce=reduce, results_path=ledger)
    from_ledger = await chunks(code, jobs, volume_name="nan", reduce=reduce + "\n# changed", results_path=ledger)
    for report in (first, from_ledger):
        assert report.reduction.seen["infinite"] == "[inf, 1.0]"
        assert report.reduction.seen["deep"] == "[" * 99 + "1.0" + "]" * 99
        assert math.isnan(report.reduction.back[0])
        assert math.isnan(report["nan"].value[0])
        assert list_draws(report) == list_draws(first)
        assert report["large"].outputs == first["large"].outputs


def test_an_id_may_contain_any_characters():
    names = ["../up", "a/b", "ü" * 300, " ", "\n"]
    report = asyncio.run(chunks("SUBMIT(same=chunk_id)", dict.fromkeys(names, 1), volume_name="letters"))
    assert [report[name].same for name in names] == names


@pytest.fixture
def small_volume(volumes: Path) -> Iterator[Path]:
    """Return the directory of a volume named "small", on a file system of 1 MiB."""
    place = volumes / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=False).returncode:
        pytest.skip("only a root that may mount can make a small file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.full
async def test_a_full_volume_raises_volume_error_and_leaves_no_partial_file(small_volume):
    code = "save_to_volume(f'{chunk_id}.bin', b'x' * data)\nSUBMIT(fine=True)"
    sizes = {"fits": 1000, "too large": 2_000_000}
    report = await chunks(code, sizes, volume_name="small", on_failure="return", max_workers=1)
    assert report["fits"].fine
    assert isinstance(report["too large"].error, VolumeError)
    assert "'too large.bin' could not be saved: No space left" in str(report["too large"].error)
    assert [file.path for file in Volume("small").ls()] == ["fits.bin"]
    assert [path.name for path in small_volume.iterdir() if path.name.endswith(".partial")] == []
    with pytest.raises(VolumeError, match="No space left"):
        Volume("small").put("home.bin", b"x" * 2_000_000)
    assert [file.path for file in Volume("small").ls()] == ["fits.bin"]
