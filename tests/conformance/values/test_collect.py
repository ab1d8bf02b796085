"""Tests of collected files, which match patterns in the working folder; their failures do not affect the result."""

import os
import sys
import tempfile
import threading
from pathlib import Path
from textwrap import dedent

import pytest

from rlm_batch import CodeCrashed, CodeError, ConfigurationError, LocalInterpreter, VolumeError
from rlm_batch.sandbox.interpreter import Interpreter
from rlm_batch.sandbox.sessions.files import download_file

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

FILES = """
import os, socket
os.makedirs("out/deep/er", exist_ok=True)
for name in ("a.png", "b.txt", "out/model.bin", "out/deep/er/c.png", "out/.hidden"):
    open(name, "wb").write(name.encode() * 50_000)
open("empty.png", "w").close()
os.symlink("/etc/passwd", "link.png")
os.symlink("/etc", "etc")
os.mkfifo("pipe.png")
open("new\\nline.png", "w").close()
open(b"\\xff.png", "w").close()
SUBMIT(done=True)
"""
REFUSED = (
    "gone/x.bin is not there",
    "etc is a link, and links are not followed",
    "link.png is a link, and links are not followed",
    "new\\nline.png has a name with characters that cannot be printed",
    "pipe.png is a named pipe",
    "\\udcff.png has a name with characters that cannot be printed",
)


def read_below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.every_provider
async def test_new_matching_files_are_collected_and_links_and_pipes_are_not(
    interpreter: Interpreter, tmp_path: Path
) -> None:
    patterns = ["*.png", "out/**", "etc/passwd", "gone/x.bin"]
    result = await interpreter.execute(FILES, collect=patterns, collect_to=tmp_path / "a")
    names = ["a.png", "empty.png", "out/deep/er/c.png", "out/model.bin"]
    assert (result.done, result.meta.not_collected) == (True, REFUSED)
    assert result.meta.collected == tuple(str(tmp_path / "a" / name) for name in names)
    assert read_below(tmp_path / "a") == {
        name: b"" if name == "empty.png" else name.encode() * 50_000 for name in names
    }
    # An older file is collected only if the execution has changed it.
    code = "open('out/model.bin', 'a').write('more'); open('d.png', 'w').write('d'); 1 / 0"
    with pytest.raises(CodeError) as failure:
        await interpreter.execute(code, collect=patterns, collect_to=tmp_path / "b")
    assert failure.value.meta is not None
    assert (
        sorted(read_below(tmp_path / "b"))
        == ["d.png", "out/model.bin"]
        == sorted(os.path.relpath(path, tmp_path / "b") for path in failure.value.meta.collected)
    )
    assert (await interpreter.execute("1")).meta.collected == ()


async def test_a_pattern_outside_the_folder_is_refused_before_the_start(tmp_path: Path) -> None:
    interpreter = LocalInterpreter(isolation="none")
    for pattern in ("../x", "/etc/passwd", "a/../../b", "", ".", "a\0b", "x" * 9000):
        with pytest.raises(ConfigurationError, match="collect"):
            interpreter.execute("1", collect=[pattern])
    with pytest.raises(ConfigurationError, match="list of patterns"):
        interpreter.execute("1", collect="*.png")
    assert interpreter._sandbox is None


async def test_files_are_collected_from_crashed_code(interpreter: Interpreter) -> None:
    """Check collection after a crash; `test_timeout` checks it after a timeout."""
    with pytest.raises(CodeCrashed) as failure:
        await interpreter.execute("open('left', 'w').write('x')\nimport os; os._exit(3)", collect=["**"])
    assert failure.value.meta is not None
    (path,) = failure.value.meta.collected
    assert Path(path).read_text() == "x"
    assert path.startswith(tempfile.gettempdir())
    os.unlink(path)
    os.rmdir(os.path.dirname(path))


async def test_holes_and_hard_links_do_not_bypass_the_collection_limit(
    interpreter: Interpreter, tmp_path: Path
) -> None:
    interpreter.sandbox.limits = {"disk_mib": 50}
    code = """
    import os
    for name, size in (("large.bin", 900 << 20), ("sparse.bin", 20 << 20), ("0.bin", 4096)):
        with open(name, "wb") as file:
            file.truncate(size)
            file.write(b"x")
    for number in range(1, 100):
        os.link("sparse.bin", f"sparse{number}.bin")
    """
    meta = (await interpreter.execute(dedent(code), collect=["*.bin", "**/*.bin"], collect_to=tmp_path)).meta
    assert sorted(read_below(tmp_path)) == ["0.bin", "sparse.bin", "sparse1.bin"]
    assert sum(path.stat().st_blocks for path in tmp_path.iterdir()) * 512 < 4 << 20  # the copies are sparse too
    assert (tmp_path / "sparse.bin").read_bytes() == b"x" + bytes((20 << 20) - 1)
    assert "large.bin has 943,718,400 bytes, and only" in (meta.not_collected[0])
    with pytest.raises(VolumeError, match="at most 52,428,800 are allowed"):
        await download_file(interpreter.sandbox, "large.bin")


async def test_collecting_deep_directories_does_not_block_the_event_loop(
    interpreter: Interpreter, tmp_path: Path
) -> None:
    code = """
    import os
    for number in range(300):
        os.makedirs(f"{number}/" + "d/" * 40)
        open(f"{number}/" + "d/" * 40 + "x", "w").close()
    """
    threads: set[int] = set()

    def note_thread(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.mkdir" and arguments[0] == "d":
            threads.add(threading.get_ident())

    sys.addaudithook(note_thread)  # stays installed, because audit hooks cannot be removed
    meta = (await interpreter.execute(dedent(code), collect=["**"], collect_to=tmp_path)).meta
    # Each of 300 files is below 41 new directories, and an execution may bring 10,000 directories.
    assert len(meta.collected) == len(os.listdir(tmp_path)) == 243
    assert "exceeds the 10,000 directories that an execution may" in meta.not_collected[0]
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.full
async def test_code_cannot_redirect_the_collection_by_swapping_files(interpreter: Interpreter, tmp_path: Path) -> None:
    """Check a context's thread that outlives its execution and swaps files and directories with links."""
    code = """
    import os, threading
    os.mkdir("d")
    for number in range(300):
        open(f"d/{number:03}.txt", "w").write("mine" * 20_000)
    os.mkdir("e"); os.symlink("/etc/passwd", "e/link"); os.symlink("/etc", "elsewhere")

    def exchange():
        while True:
            for number in range(300):
                try:
                    os.rename(f"d/{number:03}.txt", "spare")
                    os.symlink("/etc/passwd", f"d/{number:03}.txt")
                    os.rename("spare", f"d/{number:03}.txt")
                    os.rename("d", "f"); os.rename("elsewhere", "d"); os.rename("d", "elsewhere"); os.rename("f", "d")
                except OSError:
                    pass

    threading.Thread(target=exchange, daemon=True).start()
    """
    meta = (await interpreter.execute(dedent(code), context="kept", collect=["d/*.txt"], collect_to=tmp_path)).meta
    files = read_below(tmp_path)
    assert set(files.values()) <= {b"mine" * 20_000}
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))
    assert len(meta.collected) == len(files)
    reasons = (
        "is a link",
        "exchanged for something else meanwhile",
        "could not be read",
        "more files",
        "not there",
    )
    assert [text for text in meta.not_collected if not any(reason in text for reason in reasons)] == []


@pytest.mark.full
def test_files_beyond_the_collection_limit_are_counted(tmp_path: Path) -> None:
    """Check the driver's count on one provider, because no provider affects it."""
    code = "for number in range(10_150): open(f'{number:05}.txt', 'w').write(str(number))"
    with LocalInterpreter(isolation="none") as interpreter:
        meta = interpreter.execute(code, collect=["*.txt"], collect_to=tmp_path, timeout=500).meta
    assert len(meta.collected) == len(list(tmp_path.iterdir())) == 10_000
    assert len(meta.not_collected) == 101
    assert "10000.txt exceeds the 10,000 files" in meta.not_collected[0]
    assert meta.not_collected[-1] == "50 more files were not collected"
