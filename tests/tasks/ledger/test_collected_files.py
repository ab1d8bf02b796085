"""Files that executions bring home: those of a run leave room on the disk for its ledger, and for others."""

import os
from pathlib import Path

import pytest

from rlm_batch.sandbox.meta import Meta
from rlm_batch.tasks.ledger.collected_files import CollectedFilesStore

pytestmark = pytest.mark.anyio
MIB = 1024 * 1024


@pytest.mark.parametrize(("free_mib", "free_files"), [(30, 1_000_000), (1_000_000, 3)])
async def test_the_files_of_a_run_take_half_of_the_free_disk_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mib: int, free_files: int
) -> None:
    disk = (4096, 4096, 1 << 30, 1 << 30, free_mib * MIB // 4096, 1 << 30, 1 << 30, free_files, 0, 255)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(disk))
    store = CollectedFilesStore(tmp_path)
    problems: list[str] = []
    for number in range(3):
        async with store.open_partial() as partial:
            partial.mkdir(parents=True)
            (partial / "holes.bin").touch()
            os.truncate(partial / "holes.bin", 100 * MIB)  # which takes no room
            (partial / "data.bin").write_bytes(bytes(10 * MIB))
            meta = Meta(collected=(str(partial / "data.bin"), str(partial / "holes.bin")))
            meta = store.publish(partial, str(number), meta, is_final=True)
            assert bool(meta.collected) != bool(meta.not_collected)
            problems += meta.not_collected
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == ["0", "1"][: 3 - len(problems)]
    assert all("may take half of what was free on the disk" in problem for problem in problems)
    assert problems
