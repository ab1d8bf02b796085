"""Tests of the files of a pattern in every provider's sandboxes: each execution reads its own file."""

import logging
import zlib
from pathlib import Path

import pytest

from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.flows.engine.lane import Lane
from rlm_batch.flows.engine.run import Run
from rlm_batch.flows.inputs.file_patterns import MatchedFiles
from rlm_batch.flows.parameters import Options
from rlm_batch.flows.plan import Plan
from rlm_batch.tasks.capacity.admission import Admission
from rlm_batch.tasks.capacity.slots import Slots
from rlm_batch.tasks.execution import Execution

from ...infra.waiting import HANG_SECONDS

pytestmark = pytest.mark.anyio


def make_run(provider: SandboxProvider, files: MatchedFiles) -> Run:
    """Return a run whose executions read these files, in reused sandboxes."""
    options = Options(timeout=HANG_SECONDS, reuse_sandboxes=True)
    return Run(options=options, plan=Plan(total=len(files), find_uploads=files.find_uploads), provider=provider)


async def test_each_execution_reads_its_file_at_its_path(provider: SandboxProvider, tmp_path: Path) -> None:
    contents = {"a b.csv": b"\0\xff" * 300_000, "line\nbreak": b"2", "deep/été": b""}
    for name, data in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    files = MatchedFiles(f"{tmp_path}/**")
    slots = Slots(provider, Admission(), logging.getLogger("slots"))
    run = make_run(provider, files)
    lane, code = Lane(run, slots), "import zlib\nSUBMIT(found=zlib.crc32(open(path, 'rb').read()))"
    try:
        await lane.acquire_for_work()
        found = [(await lane.execute(Execution(0, code, variables, "00" * 32))).found for variables in files]
    finally:
        await lane.release()
    assert found == [zlib.crc32(contents[name]) for name in sorted(contents)]


async def test_an_execution_cannot_keep_later_ones_from_their_files(provider: SandboxProvider, tmp_path: Path) -> None:
    damages = [
        "shutil.rmtree('inputs'); open('inputs', 'w').close()",
        "os.mkdir('inputs/2')",
        "os.mkfifo('inputs/3')",
        "os.symlink('/dev/null', 'inputs/4')",
        "",
    ]
    for number in range(len(damages)):
        (tmp_path / str(number)).write_text(str(number) * 100_000)  # more than a pipe holds
    files = MatchedFiles(f"{tmp_path}/*")
    run = make_run(provider, files)
    lane = Lane(run, Slots(provider, Admission(), logging.getLogger("slots")))
    try:
        await lane.acquire_for_work()
        for (number, damage), variables in zip(enumerate(damages), files, strict=True):
            code = (
                f"import os, shutil\ntext = open(path).read()\n{damage}\nSUBMIT(text=sorted(set(text)), size=len(text))"
            )
            result = await lane.execute(Execution(number, code, variables, "00" * 32))
            assert result.outputs == {"text": [str(number)], "size": 100_000}
    finally:
        await lane.release()
