"""What a chunked job that runs again does once more, by the completion markers that it finds on its volume."""

import asyncio
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlm_batch import ConfigurationError, Result, Volume, VolumeError, chunks, reap
from rlm_batch.tasks.ledger import completion_markers

from ...infra.requirements import mark_level
from ...infra.waiting import wait_until
from .job import DOUBLE, SUM, THREE, runs

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("volumes")]


async def test_a_job_that_is_complete_is_not_run_again_even_with_another_ledger():
    code = "import os\nsave_to_volume(f'{chunk_id}.txt', os.urandom(8).hex())\nSUBMIT(random=os.urandom(8).hex())"
    first = await chunks(code, THREE, volume_name="once", reduce="import os\nSUBMIT(random=os.urandom(8).hex())")
    again = await chunks(code, THREE, volume_name="once", reduce="import os\nSUBMIT(random=os.urandom(8).hex())")
    assert first.results_path != again.results_path
    assert [again[n].random for n in THREE] == [first[n].random for n in THREE]
    assert [again[n].meta.files for n in THREE] == [(f"{n}.txt",) for n in THREE]
    assert runs(again) == set()
    assert again.reduction.random == first.reduction.random


async def test_a_chunk_whose_data_or_code_has_changed_is_run_again_and_so_is_the_reduction():
    code = "import os\nsave_to_volume(f'{chunk_id}.txt', str(data))\nSUBMIT(random=os.urandom(8).hex())"
    reduce = "import os\nSUBMIT(random=os.urandom(8).hex())"
    first = await chunks(code, THREE, volume_name="changed", reduce=reduce)
    again = await chunks(code, {**THREE, 1: [4, 5, 7]}, volume_name="changed", reduce=reduce)
    assert runs(again) == {"1"}
    assert again.reduction.random != first.reduction.random
    assert Volume("changed").get("1.txt") == b"[4, 5, 7]"
    other = await chunks(code + "\n# changed", THREE, volume_name="changed")
    assert runs(other) == {"0", "1", "2"}


async def test_a_marker_does_not_count_once_its_files_have_gone_or_changed(volumes):
    code = "import os\nsave_to_volume(f'out/{chunk_id}.txt', str(data))\nSUBMIT(random=os.urandom(8).hex())"
    await chunks(code, THREE, volume_name="evidence")
    volume = Volume("evidence")
    volume.delete("out/0.txt")
    volume.put("out/2.txt", "something else")
    now = time.time_ns()  # a file that has changed within one tick of its system's clock is not newer
    os.utime(volumes / "evidence" / "out" / "2.txt", ns=(now, now + 10**9))
    again = await chunks(code, THREE, volume_name="evidence")
    assert runs(again) == {"0", "2"}
    assert [volume.get(f"out/{n}.txt") for n in THREE] == [b"[1, 2, 3]", b"[4, 5, 6]", b"[7, 8, 9]"]


@pytest.mark.full
async def test_a_ledger_alone_is_no_evidence_where_there_is_a_volume(tmp_path, volumes):
    ledger = str(tmp_path / "ledger")
    await chunks(DOUBLE, THREE, volume_name="gone", results_path=ledger)
    (volumes / "gone").rename(volumes / "moved")
    again = await chunks(DOUBLE, THREE, volume_name="gone", results_path=ledger)
    assert runs(again) == {"0", "1", "2"}
    assert len(Volume("gone").ls()) == 3


async def test_without_a_volume_the_ledger_is_what_is_resumed_from(tmp_path):
    ledger = str(tmp_path / "ledger")
    code = "import os\nSUBMIT(random=os.urandom(8).hex(), size=len(data))"
    first = await chunks(code, THREE, results_path=ledger)
    again = await chunks(code, {**THREE, 3: [1]}, results_path=ledger)
    assert [again[n].random for n in THREE] == [first[n].random for n in THREE]
    assert again[3].size == 1


async def test_what_lies_among_the_markers_and_is_none_ends_no_later_job(volumes):
    """Code can write there: what it left would otherwise be the end of every later run of the same job."""
    jobs = {str(number): [number] for number in range(9)}
    await chunks(DOUBLE, jobs, volume_name="littered", reuse_sandboxes=True)
    (folder,) = (volumes / "littered" / ".rlm-batch" / "complete").iterdir()
    damaged = ["[]", '{"files": 5}', '{"files": [], "outputs": 5, "key": "x"}', '{"files": [], "outputs": {"x": NaN}}']
    damaged += [
        '{"files": [], "outputs": {"x": "\\ud800"}}',
        "[" * 200_000,
        find_markers(volumes / "littered")[0].read_text()[:-10],
    ]
    for marker, text in zip(find_markers(volumes / "littered"), damaged, strict=False):
        marker.write_text(text)
    os.mkfifo(folder / "a.json")
    (folder / "a.json").chmod(0o666)
    (folder / os.fsdecode(b"\xff.json")).write_text("{}")
    again = await chunks(DOUBLE, jobs, volume_name="littered", reuse_sandboxes=True, reduce=SUM)
    assert len(runs(again)) == len(damaged) == 7
    assert again.reduction.total == 2 * sum(range(9))


@pytest.fixture
def small_volume(volumes: Path) -> Iterator[Path]:
    """The directory of a volume named "small", on a file system of 1 MiB."""
    place = volumes / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=False).returncode:
        pytest.skip("only a root that may mount can make a small file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.full
async def test_a_full_volume_is_a_volume_error_and_nothing_half_written_is_left(small_volume):
    code = "save_to_volume(f'{chunk_id}.bin', b'x' * data)\nSUBMIT(fine=True)"
    given = {"fits": 1000, "too large": 2_000_000}
    report = await chunks(code, given, volume_name="small", on_failure="return", max_workers=1)
    assert report["fits"].fine
    assert isinstance(report["too large"].error, VolumeError)
    assert "the volume is full: 'too large.bin' was not saved" in str(report["too large"].error)
    assert [file.path for file in Volume("small").ls()] == ["fits.bin"]
    assert [path.name for path in small_volume.iterdir() if path.name.endswith(".partial")] == []
    with pytest.raises(VolumeError, match="No space left"):
        Volume("small").put("home.bin", b"x" * 2_000_000)
    assert [file.path for file in Volume("small").ls()] == ["fits.bin"]


async def test_a_chunk_that_cannot_be_marked_as_complete_does_not_count_as_complete(small_volume):
    fill = """
with open(VOLUME + "/filler", "wb", buffering=0) as file:
    try:
        while file.write(b"x" * 4096):
            pass
    except OSError:
        pass
SUBMIT(fine=True)
"""
    report = await chunks(fill, {"a": 0}, volume_name="small", on_failure="return")
    assert isinstance(report["a"].error, VolumeError)
    assert "could not be written to the volume" in str(report["a"].error)
    assert list(small_volume.glob(".rlm-batch/complete/*/*.json")) == []


@pytest.mark.full
def test_a_host_that_is_killed_half_way_runs_only_what_was_not_complete(tmp_path, server, volumes):
    """kill -9 in the middle, and again from the start: markers say what is complete, whatever the ledger has."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"n": n, "text": "word " * (n % 7)}) + "\n" for n in range(400)))
    program = f"""
import asyncio, os, sys
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
flow = chunks(code, data={str(data)!r}, chunk_size=10, volume_name="killed", max_workers=4, reduce=reduce)
report = asyncio.run(flow)
executed = sum(1 for outcome in report.results.values() if outcome.meta.sandbox_id)
print(report.reduction.words, report.reduction.rows, len(report.results), executed)
"""
    host = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(find_markers(volumes / "killed")) == 12)
        # All four wait for the file in their sandboxes: none of these is just being made or removed.
        wait_until(lambda: len(list(Path(tempfile.gettempdir()).glob("rlm-batch-*/sandbox.json"))) == 4)
    finally:
        host.kill()
        host.wait()
    assert len(find_markers(volumes / "killed")) == 12
    asyncio.run(reap())
    Volume("killed").put("go", "")
    again = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    words = sum(n % 7 for n in range(400))
    assert again.stdout.split() == [str(words), "400", "40", "28"]


async def test_whatever_a_chunk_may_submit_goes_through_its_marker_and_the_reduction(volumes, results):
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
    first = await chunks(code, jobs, volume_name="nan", reduce=reduce)
    for path in find_markers(volumes / "nan"):
        json.loads(path.read_text(), parse_constant=pytest.fail)
    from_markers = await chunks(code, jobs, volume_name="nan", reduce=reduce)
    assert runs(from_markers) == set()
    unsign(volumes / "nan")
    from_ledger = await chunks(code, jobs, volume_name="nan", reduce=reduce)
    for found in (first, from_markers, from_ledger):
        assert found.reduction.seen["infinite"] == "[inf, 1.0]"
        assert found.reduction.seen["deep"] == "[" * 99 + "1.0" + "]" * 99
        assert math.isnan(found.reduction.back[0])
        assert math.isnan(found["nan"].value[0])
        assert [found[name].random for name in jobs] == [first[name].random for name in jobs]
        assert found["large"].outputs == first["large"].outputs


def test_an_id_may_have_any_letters_and_its_marker_a_plain_name(volumes):
    names = ["../up", "a/b", "ü" * 300, " ", "\n"]
    report = asyncio.run(chunks("SUBMIT(same=chunk_id)", dict.fromkeys(names, 1), volume_name="letters"))
    assert [report[name].same for name in names] == names
    found = {path.name for path in (volumes / "letters").glob(".rlm-batch/complete/*/*")}
    assert found == {hashlib.sha256(name.encode()).hexdigest()[:32] + ".json" for name in names}
    assert all(isinstance(outcome, Result) for outcome in report.results.values())


def find_markers(volume: Path) -> list[Path]:
    return sorted(volume.glob(".rlm-batch/complete/*/*.json"))


def unsign(volume: Path) -> None:
    """Makes of each marker one of a version that did not sign."""
    for path in find_markers(volume):
        marker = json.loads(path.read_text())
        marker.pop("hmac", None)
        path.write_text(json.dumps(marker))


FORGE = """
import glob, json
for number, path in enumerate(glob.glob(VOLUME + "/.rlm-batch/complete/*/*.json")):
    with open(path) as file:
        marker = json.load(file)
    marker["outputs"] = dict.fromkeys(marker["outputs"], 666)
    if number:
        marker.pop("hmac", None)
    with open(path, "w") as file:
        json.dump(marker, file)
SUBMIT()
"""


async def test_code_that_writes_over_markers_gives_no_other_chunk_a_result(volumes):
    first = await chunks(DOUBLE, THREE, volume_name="attacked", reduce=SUM)
    await chunks(FORGE, {"forger": 0}, volume_name="attacked")
    again = await chunks(DOUBLE, THREE, volume_name="attacked", reduce=SUM)
    assert [again[n].outputs for n in THREE] == [first[n].outputs for n in THREE]
    assert again.reduction.outputs == first.reduction.outputs
    assert runs(again) == {"0", "1", "2"}


@pytest.mark.full
async def test_markers_without_a_signature_are_taken_by_whoever_trusts_them(volumes, results, caplog):
    code = "import os\nSUBMIT(random=os.urandom(8).hex())"
    first = await chunks(code, THREE, volume_name="older")
    unsign(volumes / "older")
    results.rename(results.with_name("moved"))  # where a ledger has the same results, the markers count
    again = await chunks(code, THREE, volume_name="older", trust_markers=True)
    assert runs(again) == set()
    assert [again[n].random for n in THREE] == [first[n].random for n in THREE]
    unsign(volumes / "older")
    results.rename(results.with_name("moved again"))
    alone = await chunks(code, THREE, volume_name="older", max_workers=1)
    assert not {alone[n].random for n in THREE} & {first[n].random for n in THREE}
    assert "pass trust_markers=True (--trust-markers)" in caplog.text
    assert "3 completion markers on the volume were not taken, as they were not signed" in caplog.text


@pytest.mark.full
async def test_machines_that_share_a_key_take_each_others_markers(volumes, results, monkeypatch):
    code = "import os\nSUBMIT(random=os.urandom(8).hex())"
    monkeypatch.setenv("RLM_BATCH_MARKER_KEY", "the key of several machines" * 2)
    first = await chunks(code, THREE, volume_name="shared")

    def move_to_another_machine(name: str) -> None:
        monkeypatch.setenv("XDG_DATA_HOME", str(results.with_name(name)))
        monkeypatch.setenv("RLM_BATCH_RESULTS", str(results.with_name(name) / "results"))

    move_to_another_machine("second")
    again = await chunks(code, THREE, volume_name="shared")
    assert runs(again) == set()
    assert [again[n].random for n in THREE] == [first[n].random for n in THREE]
    move_to_another_machine("third")
    monkeypatch.delenv("RLM_BATCH_MARKER_KEY")
    assert runs(await chunks(code, THREE, volume_name="shared")) == {"0", "1", "2"}


async def test_a_key_that_anybody_could_guess_ends_a_job_before_it_begins(volumes, monkeypatch):
    monkeypatch.setenv("RLM_BATCH_MARKER_KEY", "secret")
    with pytest.raises(ConfigurationError, match="RLM_BATCH_MARKER_KEY has 6 characters, and needs 32"):
        await chunks(DOUBLE, THREE, volume_name="guessed")
    assert list(volumes.iterdir()) == []


@pytest.mark.full
async def test_markers_of_15_mb_and_those_of_no_chunk_of_the_job_are_not_read(volumes, caplog):
    """Eight of them were read for 77 s, and ended the job."""
    jobs = {str(number): [number] for number in range(8)}
    await chunks(DOUBLE, jobs, volume_name="large")
    markers = find_markers(volumes / "large")
    for path in markers[2:]:
        path.write_text('{"files":[' + "[]," * 5_000_000 + "[]]}")
    strange = markers[0].with_name("first.json")
    strange.write_text('{"files":[' + "[]," * 300_000 + "[]]}")
    for number in range(1000):
        os.link(strange, strange.with_name(f"{number:032x}.json"))
    again = await chunks(DOUBLE, jobs, volume_name="large")
    assert len(runs(again)) == 6
    assert "6 of 8 completion markers on the volume were not read" in caplog.text
    assert max(path.stat().st_size for path in markers) < 10_000


@pytest.mark.full
async def test_what_could_not_be_read_in_time_is_run_again(volumes, monkeypatch, caplog):
    await chunks(DOUBLE, THREE, volume_name="slow")
    monkeypatch.setattr(completion_markers, "READ_SECONDS", 0.0)
    monkeypatch.setattr(completion_markers, "READ_SECONDS_PER_MARKER", 0.0)
    assert runs(await chunks(DOUBLE, THREE, volume_name="slow")) == {"0", "1", "2"}
    assert "3 of 3 completion markers on the volume were not read" in caplog.text


@pytest.mark.full
async def test_a_file_in_the_place_of_the_markers_is_told_by_name(volumes):
    await chunks(DOUBLE, THREE, volume_name="replaced")
    (folder,) = (volumes / "replaced" / ".rlm-batch" / "complete").iterdir()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("")
    with pytest.raises(
        VolumeError, match=r"completion markers in \.rlm-batch/complete/\w+ on the volume cannot be read"
    ):
        await chunks(DOUBLE, THREE, volume_name="replaced")


LOOK = """
import os
try:
    with open(data) as file:
        found = file.read()
except OSError as error:
    found = type(error).__name__
SUBMIT(found=found, environment=dict(os.environ))
"""


@pytest.mark.parametrize(
    "level", [pytest.param(level, marks=mark_level(level)) for level in ("bubblewrap", "landlock")]
)
async def test_code_finds_the_key_neither_in_its_file_nor_in_its_environment(volumes, tmp_path, monkeypatch, level):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    await chunks(LOOK, {"0": ""}, volume_name="key")  # makes the key
    path = tmp_path / "rlm-batch" / "marker.key"
    key = path.read_text().strip()
    looks = await chunks(LOOK, {"1": str(path)}, volume_name="key", provider=f"local:{level}")
    assert looks["1"].found in ("FileNotFoundError", "PermissionError")
    monkeypatch.setenv("RLM_BATCH_MARKER_KEY", key)
    looks = await chunks(LOOK, {"2": str(path)}, volume_name="key", provider=f"local:{level}")
    assert key not in str(looks["2"].outputs)
