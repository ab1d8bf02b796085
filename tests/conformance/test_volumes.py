"""Tests that the next sandbox finds what code saved to a volume, and that failures raise VolumeError."""

import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from textwrap import dedent

import pytest

from rlm_batch import ConfigurationError, VolumeError
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.interpreter import Interpreter

from ..infra.waiting import HANG_SECONDS

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

OBJECT_STORES = {"daytona"}  # providers whose volumes have neither symbolic links nor renaming
Sandboxes = Callable[[], AbstractAsyncContextManager[Interpreter]]


@pytest.fixture
def sandbox(provider: SandboxProvider, volume_name: str) -> Sandboxes:
    """Return a function that opens a new sandbox with the test's volume."""
    with_volume = provider.model_copy(update={"volume_name": volume_name})
    return lambda: with_volume.interpreter(timeout=HANG_SECONDS)


@pytest.mark.every_provider
async def test_a_file_saved_in_one_sandbox_is_loaded_in_the_next(sandbox: Sandboxes) -> None:
    code = """
        import json
        path = save_to_volume("results/chunk_0.json", json.dumps([2, 4, 6]))
        save_to_volume("results/table.bin", bytes(range(256)))
        save_to_volume("notes.txt", "one\\r\\ntwo\\u00e9\\n")
        SUBMIT(path=path, here=list_volume())
        """
    async with sandbox() as first:
        saved = await first.execute(dedent(code))
    assert saved.path == "results/chunk_0.json"
    assert saved.here == ["notes.txt", "results/chunk_0.json", "results/table.bin"]
    code = """
        import json
        table = load_from_volume("results/table.bin")
        SUBMIT(
            data=json.loads(load_from_volume("results/chunk_0.json")), table=list(table), kind=type(table).__name__,
            text=load_from_volume("notes.txt"), results=list_volume("results"),
        )
        """
    async with sandbox() as second:
        loaded = await second.execute(dedent(code))
    assert loaded.data == [2, 4, 6]
    assert loaded.table == list(range(256))
    assert loaded.kind == "bytes"
    assert loaded.text == "one\r\ntwo\u00e9\n"
    assert loaded.results == ["results/chunk_0.json", "results/table.bin"]


@pytest.mark.every_provider
async def test_files_written_by_code_and_host_are_on_the_volume(sandbox: Sandboxes) -> None:
    code = """
        import os
        os.makedirs(f"{VOLUME}/artifacts", exist_ok=True)
        with open(f"{VOLUME}/artifacts/chunk.txt", "w") as file:
            file.write("direct")
        SUBMIT(saved=load_from_volume("artifacts/chunk.txt"), whole=load_from_volume(VOLUME + "/artifacts/chunk.txt"))
        """
    async with sandbox() as first:
        result = await first.execute(dedent(code))
        assert result.outputs == {"saved": "direct", "whole": "direct"}
        assert result.meta.files == ("artifacts/chunk.txt",)
        mount = (await first.execute("SUBMIT(VOLUME)")).output
        await first.sandbox.upload(os.path.join(mount, "in", "data.bin"), b"\x00\x01")
        loaded = await first.execute("SUBMIT(list(load_from_volume('in/data.bin', binary=True)))")
        assert loaded.output == [0, 1]
        await first.execute("save_to_volume('out.txt', 'home')")
        out = os.path.join(mount, "out.txt")
        assert await first.sandbox.download(out) == await first.sandbox.download(out, max_bytes=4) == b"home"
        with pytest.raises(
            VolumeError, match=r"out\.txt' could not be read: it has 4 bytes or more, and at most 3 are"
        ):
            await first.sandbox.download(out, max_bytes=3)
    async with sandbox() as second:
        assert (await second.execute("SUBMIT(open(VOLUME + '/artifacts/chunk.txt').read())")).output == "direct"


async def test_a_file_is_replaced_by_a_later_sandbox(sandbox: Sandboxes) -> None:
    for text in ("a first that is longer", "second", ""):
        async with sandbox() as interpreter:
            await interpreter.execute("save_to_volume('deep/er/same.txt', text)", {"text": text})
            await interpreter.execute("save_to_volume(f'deep/er/{len(text)}.txt', text)", {"text": text})
        async with sandbox() as interpreter:
            assert (await interpreter.execute("SUBMIT(load_from_volume('deep/er/same.txt'))")).output == text


async def test_the_caller_chooses_text_or_bytes(sandbox: Sandboxes) -> None:
    code = """
        save_to_volume("text", "abc")
        save_to_volume("bytes", b"\\x00\\xff")
        SUBMIT(
            as_is=load_from_volume("text"), forced=list(load_from_volume("text", binary=True)),
            bytes=list(load_from_volume("bytes")), array=save_to_volume("array", bytearray(b"x")),
        )
        """
    async with sandbox() as interpreter:
        result = await interpreter.execute(dedent(code))
        assert result.outputs == {"as_is": "abc", "forced": [97, 98, 99], "bytes": [0, 255], "array": "array"}
        with pytest.raises(VolumeError, match="'bytes' is not UTF-8"):
            await interpreter.execute("load_from_volume('bytes', binary=False)")


REFUSED = (
    ("save_to_volume('../x', 'data')", "'../x' leaves the volume"),
    ("save_to_volume('a/../../x', 'data')", "leaves the volume"),
    ("save_to_volume('/etc/x', 'data')", "'/etc/x' leaves the volume"),
    ("save_to_volume(VOLUME + '/../x', 'data')", "leaves the volume"),
    ("save_to_volume(VOLUME + 'x/y', 'data')", "leaves the volume"),
    ("load_from_volume('../../etc/passwd')", "leaves the volume"),
    ("load_from_volume('/etc/passwd')", "leaves the volume"),
    ("list_volume('..')", "leaves the volume"),
    ("load_from_volume('nosuch.txt')", "there is no 'nosuch.txt' on the volume"),
    ("list_volume('nosuch')", "there is no 'nosuch' on the volume"),
    ("save_to_volume('', 'data')", "is a directory"),
)
READ_PIPE = """
import os
try:
    os.mkfifo(VOLUME + "/pipe")
except OSError:
    SUBMIT("it is no file")
try:
    load_from_volume("pipe")
except VolumeError as error:
    SUBMIT(str(error))
finally:
    os.unlink(VOLUME + "/pipe")
"""


async def test_a_missing_path_or_one_outside_the_volume_raises_volume_error(sandbox: Sandboxes) -> None:
    async with sandbox() as interpreter:
        for code, said in REFUSED:
            with pytest.raises(VolumeError, match=said) as caught:
                await interpreter.execute(code)
            assert caught.value.meta is not None
            assert caught.value.is_failure_of_code
        assert "it is no file" in (await interpreter.execute(READ_PIPE)).output
        assert (await interpreter.execute("SUBMIT(list_volume())")).output == []
        code = "try: load_from_volume('nosuch')\nexcept VolumeError as error: SUBMIT(isinstance(error, OSError))"
        assert (await interpreter.execute(code)).output is True
        code = (
            "try: save_to_volume('x.json', [1, 2])\nexcept TypeError as error: SUBMIT(str(error), there=list_volume())"
        )
        refused = await interpreter.execute(code)
        assert "json.dumps" in refused.output
        assert refused.there == []


async def test_a_symbolic_link_out_of_the_volume_is_refused(sandbox: Sandboxes, provider_name: str) -> None:
    code = """
        import os
        try:
            os.symlink("/etc/hostname", VOLUME + "/file")
            os.symlink("/etc", VOLUME + "/folder")
            os.symlink("../..", VOLUME + "/up")
        except OSError:
            SUBMIT(links=False)
        refused = []
        for what in (lambda: load_from_volume("file"), lambda: load_from_volume("folder/passwd"),
                     lambda: list_volume("folder"), lambda: list_volume("up"), lambda: save_to_volume("file", "x"),
                     lambda: save_to_volume("folder/x", "x"), lambda: save_to_volume("up/x", "x")):
            try:
                what()
            except VolumeError as error:
                refused.append("symbolic link" in str(error))
        SUBMIT(links=True, refused=refused)
        """
    async with sandbox() as interpreter:
        result = await interpreter.execute(dedent(code))
    if provider_name in OBJECT_STORES:
        assert result.outputs == {"links": False}
    else:
        assert result.outputs == {"links": True, "refused": [True] * 7}


async def test_using_a_volume_without_volume_name_raises_an_error_with_the_fix(interpreter: Interpreter) -> None:
    for code in ("save_to_volume('x', 'y')", "load_from_volume('x')", "list_volume()"):
        with pytest.raises(VolumeError, match="volume_name"):
            await interpreter.execute(code)
    assert (await interpreter.execute("SUBMIT(VOLUME)")).output is None
    for name in ("VOLUME", "save_to_volume", "load_from_volume", "list_volume"):
        with pytest.raises(ConfigurationError, match=name):
            await interpreter.execute("pass", {name: 1})


async def test_a_file_beyond_the_size_limit_leaves_nothing(sandbox: Sandboxes) -> None:
    code = """
        import os, resource
        save_to_volume("kept", "before")
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        said = []
        for name in ("new", "kept"):
            try:
                save_to_volume(name, b"x" * 1_000_000)
            except VolumeError as error:
                said.append(str(error))
        SUBMIT(said=said, there=list_volume(), ours=[n for n in os.listdir(VOLUME) if n.startswith(".")])
        """
    async with sandbox() as interpreter:
        result = await interpreter.execute(dedent(code))
    assert ["file_size_mib" in text for text in result.said] == [True, True]
    assert "new" not in result.there
    assert result.ours == []


async def test_an_interrupted_save_leaves_no_complete_looking_file(sandbox: Sandboxes) -> None:
    code = """
        import os, threading, signal, time
        block = b"x" * 64 * 1024 * 1024
        try:
            threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            while True:
                save_to_volume("large", block)
                os.remove(VOLUME + "/large")
        except BaseException:
            size = os.path.getsize(VOLUME + "/large") if "large" in list_volume() else None
            SUBMIT(size=size, ours=[n for n in os.listdir(VOLUME) if n.startswith(".")])
        """
    async with sandbox() as interpreter:
        result = await interpreter.execute(dedent(code))
    assert result.size in (None, 64 * 1024 * 1024)
    assert result.ours == []


async def test_many_executions_save_at_the_same_time(sandbox: Sandboxes) -> None:
    async with sandbox() as one, sandbox() as two:
        await asyncio.gather(
            *(
                interpreter.execute("save_to_volume(f'many/{number}.txt', str(number))", {"number": number})
                for number, interpreter in enumerate([one, two] * 10)
            )
        )
    async with sandbox() as reader:
        result = await reader.execute("SUBMIT({path: load_from_volume(path) for path in list_volume('many')})")
    assert result.output == {f"many/{number}.txt": str(number) for number in range(20)}


async def test_threads_and_processes_of_code_save_even_without_its_folder(sandbox: Sandboxes) -> None:
    code = """
        import os, tempfile, threading
        pid = os.fork()
        if pid == 0:
            save_to_volume("by-a-child.txt", "yes")
            os._exit(0)
        os.waitpid(pid, 0)
        here = tempfile.mkdtemp()
        os.chdir(here)
        os.rmdir(here)
        try:
            open("relative", "w")
        except FileNotFoundError:
            pass
        going = True
        def write():
            number = 0
            while going:
                number += 1
                save_to_volume(f"thread/{number % 50}", "x")
        threading.Thread(target=write, daemon=True).start()
        while not os.path.exists(VOLUME + "/thread"):
            pass
        SUBMIT(load_from_volume("by-a-child.txt"))
        """
    async with sandbox() as interpreter:
        assert (await interpreter.execute(dedent(code))).output == "yes"


@pytest.mark.every_provider
async def test_the_next_sandbox_reads_a_file_with_private_permissions(sandbox: Sandboxes, provider_name: str) -> None:
    code = """
        import os, tempfile
        handle, path = tempfile.mkstemp()
        os.write(handle, b"made with tempfile")
        os.close(handle)
        os.mkdir(VOLUME + "/dir")
        try:
            with open(path, "rb") as source, tempfile.NamedTemporaryFile(dir=VOLUME + "/dir", delete=False) as target:
                target.write(source.read())
            os.replace(target.name, VOLUME + "/dir/moved.txt")
        except OSError:
            SUBMIT(renames=False)
        SUBMIT(renames=True)
        """
    async with sandbox() as first:
        result = await first.execute(dedent(code))
    assert result.renames == (provider_name not in OBJECT_STORES)
    if not result.renames:
        return
    assert result.meta.files == ("dir/moved.txt",)
    async with sandbox() as second:
        name = "dir/moved.txt"
        code = f"text = load_from_volume({name!r})\nopen(f'{{VOLUME}}/{name}', 'w').write('again')\nSUBMIT(text)"
        assert (await second.execute(code)).output == "made with tempfile"


@pytest.mark.every_provider
async def test_the_host_lists_gets_puts_and_deletes_files(
    sandbox: Sandboxes, provider: SandboxProvider, volume_name: str
) -> None:
    large = bytes(range(256)) * 8192  # more than fits in one SUBMIT or one frame of a variable
    async with sandbox() as first:
        await first.execute(
            "save_to_volume('code/a.txt', 'from code')\nsave_to_volume('b.bin', bytes(range(256)) * 8192)"
        )
    assert volume_name in await provider.list_volumes()
    volume = await provider.volume(volume_name)
    try:
        await volume.put("host/c.bin", large)
        await volume.put("host/c.bin", large + b"!")
        files = [(file.path, file.size) for file in await volume.ls()]
        assert files == [("b.bin", len(large)), ("code/a.txt", 9), ("host/c.bin", len(large) + 1)]
        assert [file.path for file in await volume.ls("code")] == ["code/a.txt"]
        assert await volume.get("code/a.txt") == b"from code"
        assert await volume.get("b.bin") == large
        assert await volume.get("host/c.bin") == large + b"!"
        for path in ("../x", "/etc/passwd", "nosuch", "code", ""):
            with pytest.raises(VolumeError):
                await volume.get(path)
        for path in ("../x", "/x", ""):
            with pytest.raises(VolumeError):
                await volume.put(path, b"x")
        with pytest.raises(VolumeError):
            await volume.ls("nosuch")
        with pytest.raises(VolumeError):
            await volume.delete("nosuch")
        await volume.delete("host")
        await volume.delete("b.bin")
        assert [file.path for file in await volume.ls()] == ["code/a.txt"]
    finally:
        await volume.close()
    async with sandbox() as second:
        assert (await second.execute("SUBMIT(list_volume())")).output == ["code/a.txt"]
