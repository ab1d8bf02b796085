"""Operations that a local sandbox allows, on each isolation level."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest

from ....infra.isolation_levels import landlock

if TYPE_CHECKING:
    from ..boxes import Box

WORKS = {
    "a Python of its own": """
import subprocess
ran = subprocess.run([sys.executable, "-c", "import ssl, sqlite3; print(6 * 7)"], capture_output=True, text=True)
assert ran.stdout == "42\\n", ran
""",
    "an executable in its folder": """
import subprocess
fd = os.open("tool", os.O_CREAT | os.O_WRONLY, 0o755)
os.write(fd, b"#!/bin/sh\\necho tool\\n")
os.close(fd)
assert subprocess.run(["./tool"], capture_output=True, text=True).stdout == "tool\\n"
""",
    "temporary files": """
import tempfile
with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile(dir=folder) as file:
    file.write(b"x")
with tempfile.TemporaryFile() as file:
    file.write(b"x")
with tempfile.NamedTemporaryFile() as file:
    file.write(b"x")
""",
    "sqlite3": """
import sqlite3
with sqlite3.connect("data.db") as db:
    db.execute("pragma journal_mode=wal")
    db.execute("create table if not exists t (x)")
    db.execute("insert into t values (1)")
assert db.execute("select count(*) from t").fetchone()[0] >= 1
""",
    "copies with their status": """
import shutil
with open("original", "w") as file:
    file.write("text")
shutil.copy2("original", "copied")
shutil.copytree(".", "../tmp/tree" if os.path.isdir("../tmp/.") and os.getcwd() != "/sandbox" else "/tmp/tree",
                dirs_exist_ok=True, ignore=shutil.ignore_patterns("tree"))
assert open("copied").read() == "text"
os.chmod("copied", 0o600)
os.utime("copied", (1, 1))
shutil.move("copied", "moved")
""",
    "files touched": """
import pathlib, subprocess, sys
TOUCH = [sys.executable, "-I", "-S", "-c", "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"]
by_program = [lambda path, words=words: subprocess.run([*words, path], check=True) for words in (TOUCH, ["touch"])]
for touch in (pathlib.Path.touch, *by_program):
    path = pathlib.Path("touched")
    touch(path)
    path.write_text("text")
    touch(path)
    assert path.read_text() == "text"
    os.utime(path, (1, 1))
    path.unlink()
path.symlink_to("nowhere")
os.lchown(path, -1, -1)
os.utime(path, (1, 1), follow_symlinks=False)
with open("open", "w") as file:
    os.utime(file.fileno())
    os.chmod(file.fileno(), 0o600)
""",
    "archives": """
import tarfile, zipfile
with open("packed", "w") as file:
    file.write("text")
with tarfile.open("a.tar.gz", "w:gz") as archive:
    archive.add("packed")
with tarfile.open("a.tar.gz") as archive:
    archive.extractall("unpacked")
with zipfile.ZipFile("a.zip", "w") as archive:
    archive.write("packed")
with zipfile.ZipFile("a.zip") as archive:
    archive.extractall("unzipped")
assert open("unpacked/packed").read() == open("unzipped/packed").read() == "text"
""",
    "time zones": """
import datetime, zoneinfo
assert zoneinfo.available_timezones() or not os.path.isdir("/usr/share/zoneinfo")
if os.path.isdir("/usr/share/zoneinfo"):
    assert datetime.datetime.now(zoneinfo.ZoneInfo("Europe/Berlin"))
time.localtime()
""",
    "socket pairs": """
ours, theirs = socket.socketpair()
ours.send(b"x")
assert theirs.recv(1) == b"x"
""",
    "its own affinity and priority": """
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.nice(1)
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
""",
    "signals to itself": """
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
os.kill(os.getpid(), signal.SIGUSR1)
signal.raise_signal(signal.SIGUSR1)
signal.pthread_kill(__import__("threading").get_ident(), signal.SIGUSR1)
signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
assert len(heard) == 4
""",
    "locks on files": """
with open("locked", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    fcntl.lockf(file, fcntl.LOCK_UN)
""",
    "maps of memory": """
import mmap
with open("mapped", "w+b") as file:
    file.write(bytes(4096))
    file.flush()
    with mmap.mmap(file.fileno(), 0) as memory:
        memory[0] = 1
assert open("mapped", "rb").read(1) == b"\\1"
assert len(mmap.mmap(-1, 4096)) == 4096
""",
    "most of the library": """
import argparse, base64, bisect, bz2, calendar, cmath, collections, configparser, contextlib, copy, csv, ctypes
import dataclasses, difflib, email, enum, functools, getpass, glob, gzip, heapq, html, http.client, inspect, io
import itertools, json, locale, logging, lzma, math, mimetypes, operator, pathlib, pickle, platform, pprint, queue
import re, shlex, statistics, string, textwrap, typing, unicodedata, unittest, urllib.request, warnings, weakref
platform.platform(), mimetypes.guess_type("a.txt"), locale.getlocale(), pathlib.Path.home()
""",
}


def test_ordinary_operations_keep_working(box: Box) -> None:
    answers = {operation: box.run(f"{code}\nSUBMIT(works=True)") for operation, code in WORKS.items()}
    assert {name: answer for name, answer in answers.items() if answer.get("outputs") != {"works": True}} == {}


@pytest.mark.older_kernels(0, 1, 3)
def test_a_missing_network_raises_an_ordinary_error(box: Box) -> None:
    outputs = box.outputs("""
import urllib.error, urllib.request
try:
    urllib.request.urlopen("http://127.0.0.1:9/", timeout=60)
except urllib.error.URLError as error:
    SUBMIT(refused=isinstance(error.reason, OSError))
""")
    assert outputs == {"refused": True}


def test_code_can_signal_the_processes_that_it_starts(box: Box) -> None:
    """With Landlock ABI 6, code can signal the processes that it starts. With older ABIs, it can signal only itself."""
    code = """
import subprocess
process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
process.terminate()
assert process.wait(60) == -signal.SIGTERM
process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
os.killpg(process.pid, signal.SIGKILL)
assert process.wait(60) == -signal.SIGKILL
try:
    subprocess.run(["sleep", "1000"], timeout=0.1)
except subprocess.TimeoutExpired:
    SUBMIT(works=True)
"""
    if landlock() < 6:
        pytest.skip("this kernel's Landlock does not know signals")
    assert box.outputs(code) == {"works": True}


def test_multiprocessing_works_in_a_mount_namespace_alone(box: Box) -> None:
    code = """
import multiprocessing
context = multiprocessing.get_context("fork")
with context.Pool(2) as pool:
    SUBMIT(total=sum(pool.map(abs, range(10))))
"""
    if box.level == "landlock":  # landlock shows the host's /dev/shm
        assert "PermissionError" in box.run(code)["error"]["text"]
    else:
        assert box.outputs(code) == {"total": 45}


def test_only_the_code_can_access_its_folder(box: Box) -> None:
    folder = box.host.folders / box.run("open('mine', 'w').write('x')")["sandbox"]
    before = folder.stat().st_mode
    assert (folder / "work" / "mine").read_text() == "x"
    assert stat.S_IMODE(before) & 0o007 == 0  # other users cannot enter
    attempts = box.run_attempts("""
work = os.environ["HOME"]
attempt("record", lambda: read("../sandbox.json"))
attempt("record written", lambda: write("../sandbox.json"))
attempt("beside", lambda: os.mkdir("../beside"))
attempt("python", lambda: write(os.path.join(sys.prefix, "pyvenv.cfg")))
attempt("moved", lambda: os.rename(work, work + ".moved"))
attempt("removed", lambda: os.rmdir(os.path.join(os.path.dirname(os.environ["TMPDIR"]), "tmp")))
try:
    os.chmod("..", 0o777)
except OSError:
    pass
""")
    assert attempts.done == {}
    assert folder.stat().st_mode == before
    assert {path.name for path in folder.iterdir()} - {"python"} == {"sandbox.json", "tmp", "work"}
