"""Tests of scripts in unusual processes: a fork, blocked signals, a closed umask, no PATH, few descriptors."""

import asyncio
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from rlm_batch import LocalSandbox
from rlm_batch.blocks.local.inventory import list_sandboxes

from ..conftest import list_children
from ..infra.isolation_levels import find_strongest_level
from ..infra.machine import is_alive
from ..infra.waiting import wait_until
from .conftest import PATIENCE, Run


def test_a_forked_script_must_open_a_new_interpreter(script: Run) -> None:
    process = script("""
        interpreter = LocalInterpreter().start()
        interpreter.execute("x = 1")
        for ends in (os._exit, sys.exit):
            if (pid := os.fork()) == 0:
                for use in (lambda: interpreter.execute("x = 2"), interpreter.reset, lambda: interpreter.download("a")):
                    try:
                        use()
                    except Exception as error:
                        print(type(error).__name__, "of this forked process" in str(error), flush=True)
                interpreter.shutdown()
                with interpreter:
                    print(interpreter.execute("'x' in globals()").meta.value, flush=True)
                ends(0)
            os.waitpid(pid, 0)
        interpreter.upload("file", b"still there")
        print(interpreter.execute("[x, open('file').read()]").meta.value)
        interpreter.shutdown()
        """)
    out, errors = process.communicate(timeout=PATIENCE)
    in_fork = ["ConfigurationError True"] * 3 + ["False"]
    assert out.splitlines() == [*in_fork, *in_fork, "[1, 'still there']"], errors


def test_a_host_without_free_threads_raises_a_sentence_and_keeps_the_sandbox(script: Run) -> None:
    process = script("""
        import threading
        from rlm_batch import SandboxStartError

        def report(attempt):
            threading.stack_size(1 << 46)  # no address space has room for it
            try:
                attempt()
            except SandboxStartError as error:
                print(error)
            threading.stack_size(1 << 23)

        report(LocalInterpreter().start)
        with LocalInterpreter(tools={"f": lambda: 1}) as interpreter:
            interpreter.execute("x = 1")
            report(lambda: interpreter.execute("f()"))
            print(interpreter.execute("SUBMIT(f() + 1)").output)
        """)
    out, errors = process.communicate(timeout=PATIENCE)
    *refused, last = out.splitlines()
    assert (len(refused), last) == (2, "2"), errors
    assert all("cannot start another thread" in line and "use fewer workers" in line for line in refused)


@pytest.mark.strongest_first
def test_a_scripts_blocked_signals_and_umask_do_not_reach_its_sandboxes(script: Run, local: LocalSandbox) -> None:
    process = script(f"""
        import signal
        from rlm_batch import ExecutionTimeout
        os.umask(0o077)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, signal.SIGINT])
        with LocalInterpreter(isolation={local.isolation!r}) as interpreter:
            interpreter.upload("file", b"1")
            interpreter.execute("x = open('file').read()")
            try:
                interpreter.execute("while True: pass", timeout=1)
            except ExecutionTimeout:
                print(interpreter.execute("x").meta.value, interpreter.download("file"))
        """)
    out, errors = process.communicate(timeout=PATIENCE)
    assert out == "1 b'1'\n", errors


def test_a_script_without_a_usable_path_variable_leaves_no_folder(script: Run, tmp_path: Path) -> None:
    process = script("""
        import glob
        os.environ.update(PATH="/nonexistent", TMPDIR=os.getcwd())
        with LocalInterpreter(isolation="none") as interpreter:
            interpreter.execute("open('file', 'w').write('x')")
        print(glob.glob("rlm-batch-*"))
        """)
    out, errors = process.communicate(timeout=PATIENCE)
    assert out == "[]\n", errors


@pytest.mark.requires("isolation")
def test_a_script_without_free_descriptors_gets_an_error_and_no_weaker_isolation(script: Run) -> None:
    process = script("""
        import glob, resource, tempfile
        from rlm_batch import SandboxStartError
        def use():
            with LocalInterpreter() as interpreter:
                return interpreter.execute("1").meta.isolation
        os.chdir(tempfile.gettempdir())
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for limit in (12, 14):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            try:
                use()
            except SandboxStartError as error:
                print(error)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        print(use(), glob.glob("rlm-batch-*"))
        """)
    out, errors = process.communicate(timeout=PATIENCE)
    *sentences, end = out.splitlines()
    assert len(sentences) == 2, errors
    for sentence in sentences:
        assert "could not be tested" in sentence
        assert "Too many open files" in sentence
        assert "ulimit -n" in sentence
    assert end == f"{find_strongest_level()} []"


def list_descendants(pid: int) -> dict[int, str]:
    """Return the command lines of a process's living descendants by id."""
    children, commands = list_children(), dict[int, str]()
    below = list(children.get(pid, ()))
    for child in below:
        below += children.get(child, ())
        with suppress(OSError):
            if is_alive(child):
                commands[child] = Path(f"/proc/{child}/cmdline").read_text()
    return commands


@pytest.mark.strongest_first
@pytest.mark.parametrize("end", ["closes", "exits", "is killed"])
def test_a_burst_of_interpreters_leaves_no_process_and_no_folder(
    script: Run, local: LocalSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    process = script(f"""
        os.environ["TMPDIR"] = os.getcwd()
        import glob
        stay = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"
        for _ in range(10):
            with LocalInterpreter(isolation={local.isolation!r}) as interpreter:
                interpreter.execute(stay)
            assert not glob.glob("rlm-batch-*")
        interpreter.start().execute(stay)
        if {end == "closes"}:
            interpreter.shutdown()
            assert not glob.glob("rlm-batch-*")
        ready()
        while not os.path.exists("may-end"):
            time.sleep(0.01)
        """)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate(timeout=PATIENCE)
    known = list_descendants(process.pid)
    assert sum(command.startswith("sleep") for command in known.values()) == (end != "closes")
    if end == "is killed":
        process.kill()
    (tmp_path / "may-end").touch()
    process.communicate(timeout=PATIENCE)
    wait_until(lambda: not any(map(is_alive, known)), "the end of the script's processes")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = list_sandboxes()
    assert [sandbox.abandoned for sandbox in left] == [True] * (end == "is killed")
    for sandbox in left:
        asyncio.run(local.delete_sandbox(sandbox.id))
    assert not list(tmp_path.glob("rlm-batch-*"))
