"""Tests that executions share a sandbox's folder, and that no execution makes it unusable for the next one."""

from contextlib import suppress
from textwrap import dedent

import pytest

from rlm_batch import CodeError, SandboxLost
from rlm_batch.blocks.provider import SandboxProvider
from rlm_batch.sandbox.driver_settings import Preparation
from rlm_batch.sandbox.interpreter import Interpreter

from ..infra.waiting import HANG_SECONDS

pytestmark = [pytest.mark.anyio, pytest.mark.local_first]

SPOILERS = {
    "closed": "os.chmod(os.getcwd(), 0)",
    "read only": "os.chmod(os.getcwd(), 0o555)",
    "without temporary files": "os.chmod(tempfile.gettempdir(), 0)",
    "all closed": "os.chmod(tempfile.gettempdir(), 0o100); os.chmod(os.path.expanduser('~'), 0o400)",
    "a failure": "os.chmod(os.getcwd(), 0); 1 / 0",
    "a crash": "open(__file__); os.chmod(os.getcwd(), 0); os.chmod(tempfile.gettempdir(), 0); os._exit(3)",
    "an umask": "os.umask(0o777); open('closed', 'w').close()",
}
USE = """
    import os, subprocess, sys, tempfile
    for path in (os.getcwd(), tempfile.gettempdir(), os.path.expanduser("~")):
        with open(os.path.join(path, "probe"), "w") as file:
            file.write("1")
        os.listdir(path)
        os.remove(os.path.join(path, "probe"))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", "open('x', 'w').close()"], cwd=folder, check=True)
    assert not (own := [name for name in os.listdir() if name.startswith(".rlm-batch")]), own
    SUBMIT(kept=open("kept").read())
    """


async def test_folders_are_restored_between_executions(interpreter: Interpreter) -> None:
    await interpreter.execute("open('kept', 'w').write('of the first')")
    for name, code in SPOILERS.items():
        with suppress(CodeError):
            await interpreter.execute("import os, tempfile\n" + code)
        for context in (None, name, None):
            assert (await interpreter.execute(dedent(USE), context=context)).kept == "of the first", name
        await interpreter.forget_context(name)


LEFT = """
    import os, tempfile
    folder = os.path.join(tempfile.gettempdir(), "build")
    os.makedirs(os.path.join(folder, "closed", "below"))
    os.chmod(os.path.join(folder, "closed"), 0)
    if os.getcwd() == "/sandbox":
        from multiprocessing import resource_tracker, shared_memory
        resource_tracker.register = lambda *_: None
        shared_memory.SharedMemory("named", create=True, size=1000)
        filled = os.open("/dev/shm/filled", os.O_CREAT | os.O_RDWR)
        os.posix_fallocate(filled, 0, 100 << 20)
    SUBMIT(prepared=os.path.exists(os.path.join(tempfile.gettempdir(), "prepared")))
    """
# These names are together longer than the limit of a program's arguments.
MANY_NAMES = "for number in range(9000): os.mkdir(f'{tempfile.gettempdir()}/{number:0>250}')\n"


async def test_executions_share_no_temporary_files_but_those_of_prepare(provider: SandboxProvider) -> None:
    if provider.provider_name != "local":
        pytest.skip("the temporary folder of a machine is not ours to empty")
    async with provider.interpreter(timeout=HANG_SECONDS) as interpreter:
        sandboxes = {(await interpreter.execute(dedent(LEFT))).meta.sandbox_id for _ in range(3)}
        sandboxes.add((await interpreter.execute("import os, tempfile\n" + MANY_NAMES + dedent(LEFT))).meta.sandbox_id)
        sandboxes.add((await interpreter.execute(dedent(LEFT))).meta.sandbox_id)
        assert len(sandboxes) == 1
        await interpreter.execute(dedent(LEFT), context="c")  # a context, whose state stays
        await interpreter.execute("import os, tempfile; os.chmod(tempfile.gettempdir(), 0)")
        code = "import os; SUBMIT(found=os.path.isdir(folder))"
        assert (await interpreter.execute(code, context="c")).found is True
    prepare = "import os, tempfile; open(os.path.join(tempfile.gettempdir(), 'prepared'), 'w').close()"
    async with provider.interpreter(timeout=HANG_SECONDS, prepare=Preparation(prepare)) as interpreter:
        for _ in range(3):
            assert (await interpreter.execute(dedent(LEFT))).prepared is True


async def test_a_sandbox_without_its_folder_accepts_no_execution(provider: SandboxProvider) -> None:
    """Check a removed folder; on the isolated levels code cannot remove it."""
    async with provider.interpreter(timeout=HANG_SECONDS) as interpreter:
        await interpreter.execute("x = 1", context="c")
        code = """
            import os, shutil
            folder = os.getcwd()
            shutil.rmtree(folder, ignore_errors=True)
            SUBMIT(gone=not os.path.exists(folder))
            """
        gone = (await interpreter.execute(dedent(code))).gone
        assert interpreter.is_alive is not gone
        if gone:
            assert (await interpreter.execute("SUBMIT(x=x)", context="c")).x == 1
            for _ in range(2):
                with pytest.raises(SandboxLost, match="removed or closed its working folder"):
                    await interpreter.execute("SUBMIT()")
