"""The chunks flow: its results, its data and its volumes."""

import json
import stat
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from rlm_batch import (
    CodeError,
    ConfigurationError,
    DaytonaSandbox,
    DeadlineExceeded,
    ExecutionsFailed,
    ModalSandbox,
    NotRun,
    Volume,
    VolumeError,
    chunks,
)
from rlm_batch.blocks.registry import resolve_provider

from .job import DOUBLE, SUM, THREE

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("volumes")]


async def test_three_workers_write_three_chunks_to_a_volume():
    report = await chunks(DOUBLE, THREE, volume_name="doubled", max_workers=3, reduce=SUM)
    assert [report[number].count for number in THREE] == [3, 3, 3]
    assert [report.results[name].chunk_id for name in ("0", "1", "2")] == ["0", "1", "2"]
    volume = Volume("doubled")
    assert [file.path for file in volume.ls()] == [f"results/chunk_{number}.json" for number in range(3)]
    doubled = [json.loads(volume.get(f"results/chunk_{number}.json")) for number in range(3)]
    assert doubled == [[2, 4, 6], [8, 10, 12], [14, 16, 18]]
    assert report.reduction.outputs == {"total": 90, "files": 3, "counts": {"0": 3, "1": 3, "2": 3}}
    assert report.overlaps == {}
    assert len({outcome.meta.sandbox_id for outcome in (*report.results.values(), report.reduction)}) == 4
    assert "count" in str(report)


@pytest.fixture(params=["daytona", "modal"])
async def remote(request: pytest.FixtureRequest) -> str:
    """Return the `provider` parameter of a provider whose sandboxes and volumes are on other machines."""
    if request.param == "daytona":
        request.getfixturevalue("daytona")
        await DaytonaSandbox(image="python:3.12").save("remote", overwrite=True)  # type: ignore[misc]
        return "rlm-daytona-sandbox/remote"
    hello = request.getfixturevalue("modal_standin").hello
    block = ModalSandbox(token_id=hello["token_id"], token_secret=hello["token_secret"])
    await block.save("remote", overwrite=True)  # type: ignore[misc]
    return "rlm-modal-sandbox/remote"


@pytest.mark.full
async def test_a_chunked_job_on_any_provider_skips_complete_chunks(remote, tmp_path):
    name = f"chunks-{uuid.uuid4().hex[:8]}"
    jobs = {**THREE, "large": [0] * 200_000}
    options: dict[str, Any] = {"volume_name": name, "provider": remote, "max_workers": 3, "reduce": SUM}
    options["results_path"] = str(tmp_path / "ledger")
    report = await chunks(DOUBLE, jobs, **options)
    assert [report[number].outputs for number in THREE] == [{"chunk_id": str(n), "count": 3} for n in range(3)]
    assert report.reduction.outputs == {"total": 90, "files": 4, "counts": {"0": 3, "1": 3, "2": 3, "large": 200_000}}
    volume = await (await resolve_provider(remote)).volume(name)
    try:
        doubled = [json.loads(await volume.get(f"results/chunk_{number}.json")) for number in range(3)]
    finally:
        await volume.close()
    assert doubled == [[2, 4, 6], [8, 10, 12], [14, 16, 18]]
    again = await chunks(DOUBLE, {**jobs, 2: [1]}, **options)
    before, after = ({name: outcome.meta.sandbox_id for name, outcome in r.results.items()} for r in (report, again))
    assert [name for name in after if after[name] != before[name]] == ["2"]
    assert again.reduction.total == 44


async def test_a_list_and_a_file_are_split_into_chunks(tmp_path):
    rows = [1, "two", {"x": 3}, [4], 5.5]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n\n".join(map(json.dumps, rows)))
    for data in (rows, str(lines)):
        report = await chunks("SUBMIT(rows=data)", data=data, chunk_size=2)
        assert {name: result.rows for name, result in report.results.items()} == {
            "0": [1, "two"],
            "1": [{"x": 3}, [4]],
            "2": [5.5],
        }


async def test_chunks_are_read_from_files_of_ids_and_data(tmp_path):
    lines, cells = tmp_path / "chunks.jsonl", tmp_path / "chunks.csv"
    lines.write_text('{"id": "first", "data": [1, 2]}\n{"id": 7, "data": "text"}\n')
    cells.write_text('id,data\nfirst,"[1, 2]"\n7,text\n')
    code = "SUBMIT(data=data, id=chunk_id)"
    for report in (await chunks(code, str(lines)), await chunks(code, str(cells), types="json")):
        assert {name: (result.data, result.id) for name, result in report.results.items()} == {
            "first": ([1, 2], "first"),
            "7": ("text", "7"),
        }


async def test_large_chunks_and_results_use_files_and_the_same_names():
    code = "import os\nSUBMIT(size=len(data[0]), end=data[0][-1], left=os.listdir('.'), text=data[0][:150_000])"
    reduce = "SUBMIT(sizes={name: len(fields['text']) for name, fields in results.items()})"
    sizes = {"small": 10, "just under": 250_000, "over": 300_000, "large": 5_000_000}
    jobs = {name: ["é" * (size // 2) + name[0]] for name, size in sizes.items()}
    report = await chunks(code, jobs, volume_name="large", reduce=reduce, max_workers=2)
    for name, size in sizes.items():
        outputs = dict(report[name].outputs)
        del outputs["text"]
        assert outputs == {"size": size // 2 + 1, "end": name[0], "left": []}
    assert report.reduction.sizes == {"small": 6, "just under": 125_001, "over": 150_000, "large": 150_000}
    assert report["large"].meta.variables == {"chunk_id": "large"}  # the ledger does not repeat the data


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "pass one of `chunks` or `data`"),
        ({"chunks": {"a": 1}, "data": [1], "chunk_size": 1}, "pass one of `chunks` or `data`"),
        ({"data": [1]}, "`data` needs `chunk_size`"),
        ({"chunks": {"a": 1}, "chunk_size": 2}, "`chunk_size` needs `data`"),
        ({"data": [], "chunk_size": 1}, "empty"),
        ({"chunks": {1: "a", "1": "b"}}, "the same id"),
        ({"chunks": "{here}/rows.jsonl"}, "a chunk needs id and data"),
        ({"chunks": "{here}/twice.jsonl"}, "like an earlier one"),
        ({"chunks": "{here}/null.jsonl"}, "is not a chunk id"),
        ({"chunks": {"a": 1}, "volume_name": "../x"}, "not the name of a volume"),
    ],
)
async def test_invalid_input_is_refused_with_one_sentence(tmp_path, parameters, message):
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "twice.jsonl").write_text('{"id": 1, "data": 1}\n{"id": "1", "data": 2}\n')
    (tmp_path / "null.jsonl").write_text('{"id": null, "data": 1}\n')
    arguments: dict[str, Any] = {
        name: v.format(here=tmp_path) if isinstance(v, str) else v for name, v in parameters.items()
    }
    with pytest.raises(ConfigurationError, match=message):
        await chunks("SUBMIT(x=1)", **arguments)


async def test_two_chunks_that_write_the_same_file_are_reported(caplog):
    code = """
if chunk_id == "a":
    save_to_volume("same.txt", chunk_id)
else:
    with open(VOLUME + "/same.txt", "w") as file:
        file.write(chunk_id)
save_to_volume(f"own/{chunk_id}", "x")
"""
    with caplog.at_level("WARNING"):
        report = await chunks(code, {"a": 1, "b": 2, "c": 3}, volume_name="overlap")
    assert report.overlaps == {"same.txt": ["a", "b", "c"]}
    assert any("several chunks (a, b, c) wrote same.txt on the volume" in line.getMessage() for line in caplog.records)


async def test_a_failed_chunk_prevents_the_reduction():
    code = "if not data: load_from_volume('x')\nSUBMIT(y=1 / (data - 1))"
    jobs = {"a": 2, "b": 1, "c": 0}
    with pytest.raises(
        ExecutionsFailed, match="2 of 4 executions failed and 1 did not run, the first is number 1"
    ) as caught:
        await chunks(code, jobs, reduce="SUBMIT(n=len(results))")
    result, broken, volumeless, reduction = caught.value.results
    assert result.y == 1
    assert isinstance(broken.error, CodeError)
    assert isinstance(volumeless.error, VolumeError)
    assert "volume_name" in str(volumeless.error)
    assert isinstance(reduction.error, NotRun)
    assert "2 of 3 executions have no result" in str(reduction.error)


async def test_a_deadline_ends_the_whole_job():
    code = "import time\ntime.sleep(1000)"
    report = await chunks(code, {"a": 0}, deadline=2, reduce="SUBMIT(x=1)", on_failure="return")
    assert isinstance(report["a"].error, DeadlineExceeded)
    assert isinstance(report.reduction.error, NotRun)


@pytest.mark.requires("root")
async def test_chunk_files_are_accessible_only_to_the_volumes_group(volumes):
    await chunks(DOUBLE, THREE, volume_name="owned", provider="local:landlock")
    top = (volumes / "owned").stat()
    assert stat.S_IMODE(top.st_mode) == 0o2770
    files = list((volumes / "owned" / "results").iterdir())
    assert {file.stat().st_gid for file in files} == {top.st_gid}
    assert len({file.stat().st_uid for file in files}) == 3


@pytest.mark.full
def test_a_large_file_is_streamed_in_bounded_memory(tmp_path):
    """Stream 200 MB in 40 chunks, each into a sandbox as a file; the host's memory stays under 300 MB."""
    data: Path = tmp_path / "rows.jsonl"
    line = json.dumps({"n": 1, "text": "word " * 2000}) + "\n"
    with data.open("w") as file:
        file.writelines(line for _ in range(20_000))
    assert data.stat().st_size > 200_000_000
    program = f"""
import asyncio
from rlm_batch import chunks
code = "SUBMIT(rows=len(data), n=sum(row['n'] for row in data))"
report = asyncio.run(chunks(code, data={str(data)!r}, chunk_size=500, max_workers=2, reuse_sandboxes=True,
                            reduce="SUBMIT(rows=sum(fields['rows'] for fields in results.values()))"))
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(len(report.results), report.reduction.rows, peak)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    parts, rows, peak = map(int, done.stdout.split())
    assert (parts, rows) == (40, 20_000)
    assert peak < 300_000  # KiB
