"""What a person gets from the chunks flow."""

import asyncio
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
    LocalSandbox,
    ModalSandbox,
    NotRun,
    Volume,
    VolumeError,
    chunks,
)
from rlm_batch.blocks.registry import resolve_provider

from ...infra.requirements import mark_level
from ..conftest import OutputListener
from .job import DOUBLE, SUM, THREE, runs

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("volumes")]


async def test_three_chunks_are_doubled_onto_a_volume_by_three_workers():
    report = await chunks(DOUBLE, THREE, volume_name="doubled", max_workers=3, reduce=SUM)
    assert [report[number].count for number in THREE] == [3, 3, 3]
    assert [report.results[name].chunk_id for name in ("0", "1", "2")] == ["0", "1", "2"]
    volume = Volume("doubled")
    assert [file.path for file in volume.ls()] == [f"results/chunk_{number}.json" for number in range(3)]
    found = [json.loads(volume.get(f"results/chunk_{number}.json")) for number in range(3)]
    assert found == [[2, 4, 6], [8, 10, 12], [14, 16, 18]]
    assert report.reduction.outputs == {"total": 90, "files": 3, "counts": {"0": 3, "1": 3, "2": 3}}
    assert report.overlaps == {}
    assert len({outcome.meta.sandbox_id for outcome in (*report.results.values(), report.reduction)}) == 4
    assert "count" in str(report)


@pytest.fixture(params=["daytona", pytest.param("modal", marks=pytest.mark.full)])
async def remote(request: pytest.FixtureRequest) -> str:
    """A provider whose sandboxes and volumes are not this machine's, as a flow's parameter names it."""
    if request.param == "daytona":
        request.getfixturevalue("daytona")
        await DaytonaSandbox(image="python:3.12").save("remote", overwrite=True)  # type: ignore[misc]
        return "daytona-sandbox/remote"
    hello = request.getfixturevalue("modal_standin").hello
    block = ModalSandbox(token_id=hello["token_id"], token_secret=hello["token_secret"])
    await block.save("remote", overwrite=True)  # type: ignore[misc]
    return "modal-sandbox/remote"


@pytest.mark.full
async def test_a_chunked_job_is_the_same_elsewhere_and_is_not_run_again(remote):
    name = f"chunks-{uuid.uuid4().hex[:8]}"
    report = await chunks(DOUBLE, THREE, volume_name=name, provider=remote, max_workers=3, reduce=SUM)
    assert [report[number].outputs for number in THREE] == [{"chunk_id": str(n), "count": 3} for n in range(3)]
    assert report.reduction.outputs == {"total": 90, "files": 3, "counts": {"0": 3, "1": 3, "2": 3}}
    volume = await (await resolve_provider(remote)).volume(name)
    try:
        found = [json.loads(await volume.get(f"results/chunk_{number}.json")) for number in range(3)]
    finally:
        await volume.close()
    assert found == [[2, 4, 6], [8, 10, 12], [14, 16, 18]]
    again = await chunks(DOUBLE, {**THREE, 2: [1]}, volume_name=name, provider=remote, max_workers=3, reduce=SUM)
    assert runs(again) == {"2"}
    assert again.reduction.total == 44


@pytest.mark.full
async def test_large_chunks_and_two_writers_of_a_file_are_the_same_elsewhere(remote):
    code = "save_to_volume('same.txt', chunk_id)\nSUBMIT(size=len(data))"
    given = {"small": "x" * 10, "large": "y" * 1_000_000}
    report = await chunks(code, given, volume_name=f"chunks-{uuid.uuid4().hex[:8]}", provider=remote, max_workers=2)
    assert {name: outcome.size for name, outcome in report.results.items()} == {"small": 10, "large": 1_000_000}
    assert report.overlaps == {"same.txt": ["small", "large"]}


@pytest.mark.parametrize(
    "provider",
    [
        pytest.param(f"local:{level}", marks=[*mark_level(level), *([pytest.mark.full] if level == "none" else [])])
        for level in ("bubblewrap", "landlock", "none")
    ],
)
async def test_a_volume_is_the_same_on_every_level_of_isolation(provider):
    report = await chunks(DOUBLE, THREE, volume_name="levels", provider=provider, reduce=SUM)
    assert report.reduction.total == 90


@pytest.mark.full
@pytest.mark.requires("bubblewrap")  # only it mounts
async def test_code_may_write_straight_below_the_mount_path():
    await LocalSandbox(volume_name="direct", volume_mount_path="/home/daytona/memory").save("mounted", overwrite=True)  # type: ignore[misc]
    code = """
import json, os
os.makedirs("/home/daytona/memory/artifacts", exist_ok=True)
with open(f"/home/daytona/memory/artifacts/chunk_{chunk_id}.json", "w") as file:
    json.dump([x * 2 for x in data], file)
SUBMIT(chunk_id=chunk_id, count=len(data))
"""
    report = await chunks(code, THREE, provider="local-sandbox/mounted", max_workers=3)
    assert report[2].meta.files == ("artifacts/chunk_2.json",)
    assert json.loads(Volume(provider="local-sandbox/mounted").get("artifacts/chunk_2.json")) == [14, 16, 18]


async def test_data_is_cut_into_chunks_from_a_list_and_from_files(tmp_path):
    code = "SUBMIT(rows=data, kinds=[type(row).__name__ for row in data])"
    lines, cells = tmp_path / "rows.jsonl", tmp_path / "rows.csv"
    lines.write_text('1\n"two"\n\n{"x": 3}\n[4]\n5.5\n')
    cells.write_text("a,b\n1,x\n2,y\n3,z\n")
    for data in ([1, "two", {"x": 3}, [4], 5.5], str(lines)):
        report = await chunks(code, data=data, chunk_size=2)
        assert {name: result.rows for name, result in report.results.items()} == {
            "0": [1, "two"],
            "1": [{"x": 3}, [4]],
            "2": [5.5],
        }
    report = await chunks(code, data=str(cells), chunk_size=2)
    assert report["1"].rows == [{"a": 3, "b": "z"}]


async def test_chunks_come_from_files_of_ids_and_data(tmp_path):
    lines, cells = tmp_path / "chunks.jsonl", tmp_path / "chunks.csv"
    lines.write_text('{"id": "first", "data": [1, 2]}\n{"id": 7, "data": "text"}\n')
    cells.write_text('id,data\nfirst,"[1, 2]"\n7,text\n')
    code = "SUBMIT(data=data, id=chunk_id)"
    for report in (await chunks(code, str(lines)), await chunks(code, str(cells), types="json")):
        assert {name: (result.data, result.id) for name, result in report.results.items()} == {
            "first": ([1, 2], "first"),
            "7": ("text", "7"),
        }


async def test_large_chunks_go_as_files_and_the_code_sees_the_same_names(tmp_path):
    code = "import os\nSUBMIT(size=len(data[0]), end=data[0][-1], left=os.listdir('.'))"
    sizes = {"small": 10, "just under": 250_000, "over": 300_000, "large": 5_000_000}
    given = {name: ["é" * (size // 2) + name[0]] for name, size in sizes.items()}
    report = await chunks(code, given, volume_name="large", max_workers=2)
    for name, size in sizes.items():
        assert report[name].outputs == {"size": size // 2 + 1, "end": name[0], "left": []}
    ledger = sum(part.stat().st_size for part in Path(report.results_path).glob("part-*.jsonl"))
    assert ledger < 20_000  # it repeats no data
    assert report["large"].meta.variables == {"chunk_id": "large"}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "one of the two"),
        ({"chunks": {"a": 1}, "data": [1], "chunk_size": 1}, "one of the two"),
        ({"data": [1]}, "chunk_size is missing"),
        ({"chunks": {"a": 1}, "chunk_size": 2}, "chunk_size goes with data"),
        ({"chunks": {}}, "empty"),
        ({"data": [], "chunk_size": 1}, "empty"),
        ({"data": "{here}/nosuch.jsonl", "chunk_size": 1}, "No such file"),
        ({"data": "{here}/broken.jsonl", "chunk_size": 1}, "line 2 of .* is not JSON"),
        ({"chunks": "{here}/rows.jsonl"}, "a chunk has id and data"),
        ({"chunks": "{here}/twice.jsonl"}, "which an earlier one has too"),
        ({"chunks": "{here}/null.jsonl"}, "is no chunk id"),
        ({"chunks": {"a": 1}, "volume_name": "../x"}, "no name of a volume"),
        ({"chunks": {"a": 1}, "provider": "nosuch"}, "unknown provider"),
    ],
)
async def test_bad_input_is_one_sentence_before_anything_runs(tmp_path, parameters, message):
    (tmp_path / "broken.jsonl").write_text("1\n{\n")
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "twice.jsonl").write_text('{"id": 1, "data": 1}\n{"id": "1", "data": 2}\n')
    (tmp_path / "null.jsonl").write_text('{"id": null, "data": 1}\n')
    given: dict[str, Any] = {
        name: v.format(here=tmp_path) if isinstance(v, str) else v for name, v in parameters.items()
    }
    with pytest.raises(ConfigurationError, match=message):
        await chunks("SUBMIT(x=1)", **given)


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
    assert any(
        "same.txt on the volume was written by the chunks a, b, c" in line.getMessage() for line in caplog.records
    )


async def test_a_chunk_that_fails_keeps_the_reduction_from_running_on_a_part():
    code = "SUBMIT(y=1 / data)"
    report = await chunks(code, {"a": 1, "b": 0}, reduce="SUBMIT(n=len(results))", on_failure="return")
    assert report["a"].y == 1
    assert isinstance(report["b"].error, CodeError)
    assert isinstance(report.reduction.error, NotRun)
    assert "1 of 2 chunks have no result" in str(report.reduction.error)
    with pytest.raises(ExecutionsFailed, match="1 of 3 executions failed and 1 not run, first number 1"):
        await chunks(code, {"a": 1, "b": 0}, reduce="SUBMIT(n=len(results))")


async def test_a_chunk_without_a_volume_that_needs_one_says_how_to_ask():
    report = await chunks(DOUBLE, {"a": [1]}, on_failure="return")
    assert isinstance(report["a"].error, VolumeError)
    assert "volume_name" in str(report["a"].error)


@pytest.mark.full
async def test_a_deadline_ends_the_whole_job_and_what_is_complete_stays():
    code = "import time\nsave_to_volume(chunk_id, 'x')\ntime.sleep(data)\nSUBMIT(x=1)"
    given = {"quick": 0, "slow": 60}
    report = await chunks(
        code, given, volume_name="late", max_workers=1, deadline=20, reduce="SUBMIT(x=1)", on_failure="return"
    )
    assert report["quick"].x == 1
    assert isinstance(report["slow"].error, DeadlineExceeded)
    assert isinstance(report.reduction.error, NotRun)
    again = await chunks(code, given, volume_name="late", max_workers=1, deadline=20, on_failure="return")
    assert runs(again) == set()
    assert isinstance(again["slow"].error, DeadlineExceeded)


@pytest.mark.full
async def test_the_reduction_finds_what_many_chunks_submitted():
    given = {str(number): number for number in range(40)}
    code = "SUBMIT(text='x' * 20_000, number=data)"
    report = await chunks(
        code, given, reduce="SUBMIT(n=len(results), sum=sum(r['number'] for r in results.values()))", max_workers=2
    )
    assert report.reduction.outputs == {"n": 40, "sum": 780}


@pytest.mark.requires("root")
async def test_what_chunks_write_belongs_to_the_volumes_group_and_to_nobody_else(volumes):
    await chunks(DOUBLE, THREE, volume_name="owned", provider="local:landlock")
    top = (volumes / "owned").stat()
    assert stat.S_IMODE(top.st_mode) == 0o2770
    files = list((volumes / "owned" / "results").iterdir())
    assert {file.stat().st_gid for file in files} == {top.st_gid}
    assert len({file.stat().st_uid for file in files}) == 3


async def test_cancelling_the_flow_ends_promptly_and_leaves_no_sandbox():
    code, output = "import time; print('begun', flush=True); time.sleep(60)", OutputListener()
    given = {str(i): i for i in range(6)}
    task = asyncio.create_task(chunks.with_listener(output)(code, given, volume_name="cancelled", max_workers=2))
    await output.wait_for(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(30):  # the code alone would take sixty
            await task


@pytest.mark.full
def test_a_large_file_is_streamed_and_never_in_memory_as_a_whole(tmp_path):
    """200 MB in 200 chunks, each of which goes into its sandbox as a file: the host stays under 300 MB."""
    data, chunks = tmp_path / "rows.jsonl", 200
    line = json.dumps({"n": 1, "text": "word " * 2000}) + "\n"
    with data.open("w") as file:
        file.writelines(line for _ in range(100 * chunks))
    assert data.stat().st_size > 1_000_000 * chunks
    program = f"""
import asyncio
from rlm_batch import chunks
code = "SUBMIT(rows=len(data), n=sum(row['n'] for row in data))"
report = asyncio.run(chunks(code, data={str(data)!r}, chunk_size=100, volume_name="streamed", max_workers=8,
                            reduce="SUBMIT(rows=sum(fields['rows'] for fields in results.values()))"))
(peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(len(report.results), report.reduction.rows, peak)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True, timeout=110)
    parts, rows, peak = map(int, done.stdout.split())
    assert (parts, rows) == (chunks, 100 * chunks)
    assert peak < 300_000  # KiB


def test_parameters_have_descriptions_and_bounds_for_the_form_in_the_ui():
    schema = chunks.parameters.model_dump()["properties"]
    assert schema["chunk_size"]["anyOf"][0]["minimum"] == 1
    assert all(schema[name].get("description") for name in schema)


def test_two_ids_that_become_the_same_text_are_refused():
    with pytest.raises(ConfigurationError, match="the same id"):
        asyncio.run(chunks("pass", {1: "a", "1": "b"}))
