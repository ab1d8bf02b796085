"""Tests of mounted host files in every provider's sandboxes: at the requested path, and unchanged on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlm_batch import ConfigurationError
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.driver_settings import Preparation
from rlm_batch.sandbox.process_identity import read_own_identity

pytestmark = pytest.mark.anyio
CODE = """
import os
try:
    os.unlink(os.path.join(folder, "rows.bin"))
except OSError:
    pass
SUBMIT(rows=ROWS, one=ONE, below=os.listdir(os.path.join(folder, "sub", "größer")))
"""


async def test_code_and_its_preparation_read_files_and_directories(
    provider: SandboxProvider, provider_name: str, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    folder, one = tmp_path / "set", tmp_path / "one.bin"
    (folder / "sub" / "größer").mkdir(parents=True)
    data = bytes(range(256)) * 1000
    for path in (folder / "rows.bin", one):
        path.write_bytes(data)
    is_own_path = provider_name in ("local-landlock", "local-none")
    root = "/home/daytona" if provider_name == "daytona" else ""  # the sandbox's user may not write to the root
    targets = (str(folder), str(one)) if is_own_path else (f"{root}/data/the set", f"{root}/data/one")
    changed_provider = provider.with_files(mounts=dict(zip(targets, (folder, one), strict=True)))
    assert (await changed_provider.fingerprint())["mounts"].keys() == set(targets)
    prepare = f"ROWS, ONE = (sum(open(path, 'rb').read()) for path in ({targets[0] + '/rows.bin'!r}, {targets[1]!r}))"
    async with changed_provider.interpreter(prepare=Preparation(prepare)) as interpreter:
        result = await interpreter.execute(CODE, {"folder": targets[0]})
    assert result.outputs == {"rows": sum(data), "one": sum(data), "below": []}
    if provider_name != "local-none":
        assert (folder / "rows.bin").read_bytes() == data


async def test_a_path_that_the_sandbox_needs_is_refused_before_one_is_opened(
    provider: SandboxProvider, tmp_path: Path
) -> None:
    for target in ("/", "/usr/lib", "/proc/x"):
        with pytest.raises(ConfigurationError, match="used by the sandbox itself"):
            provider.with_files(mounts={target: tmp_path})
    mine = read_own_identity()  # a container engine also lists other processes' sandboxes
    assert [info for info in await provider.list_sandboxes() if info.process == mine] == []
