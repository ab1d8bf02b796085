"""Podman for tests: a separate store, and an image built from this machine's Python because there is no registry.

The store stays between runs of the tests, because building an image takes some seconds. `CONTAINERS_STORAGE_CONF`
directs the tests to it; it has no other containers or images.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

from rlm_batch.blocks.container.settings import DEFAULT_IMAGE

PLACE = Path("/var/tmp") / f"tests-of-rlm-batch-{os.getuid()}"
PROGRAMS = [
    "sh",
    "sleep",
    "cat",
    "ls",
    "true",
    "env",
    "kill",
    "head",
    "touch",
    "nohup",
    "echo",
    "yes",
    "sed",
    "tr",
    "seq",
    "sort",
]
LEFT_OUT = ("site-packages", "test", "idlelib", "tkinter", "turtledemo", "lib2to3")
STORAGE = """
[storage]
driver = "overlay"
graphroot = "{place}/storage"
runroot = "{place}/run"
"""
# crun refuses a mix of cgroup v1 and v2, and systemd may be missing.
ENGINE = """
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
tmp_dir = "{place}/libpod"
"""


def use_own_storage(home: Path) -> None:
    """Make every Podman that this process starts use the tests' store."""
    for variable, name, text in (
        ("CONTAINERS_STORAGE_CONF", "storage.conf", STORAGE),
        ("CONTAINERS_CONF", "containers.conf", ENGINE),
    ):
        (home / name).write_text(text.format(place=PLACE))
        os.environ[variable] = str(home / name)


@cache
def find_missing_podman() -> str:
    """Return what this machine lacks for Podman containers, in words; empty if a test container has run."""
    for program in ("podman", "runc"):
        if not shutil.which(program):
            return f"there is no {program} here (sandboxes that are containers): install {program}"
    if os.getuid():
        return "the tests run as an ordinary user, and those of containers need root"
    try:
        _ensure_image()
        words = ["run", "--rm", "--network", "none", "--log-driver", "none"]
        words += ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024", DEFAULT_IMAGE, "true"]
        _run_podman(*words)
    except (OSError, subprocess.SubprocessError) as error:
        words = getattr(error, "stderr", None) or str(error)
        return f"podman runs no container here: {words.strip().splitlines()[-1]}"
    return ""


def name_image() -> str:
    """Return the image's own name, which changes with its contents."""
    text = "".join([Path(__file__).read_text(), sys.version, sys.base_prefix])
    return f"localhost/tests-of-rlm-batch:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _run_podman(*words: str) -> str:
    return subprocess.run(["podman", *words], check=True, capture_output=True, text=True, timeout=100).stdout


def _ensure_image() -> None:
    """Build the image once and tag it with the default image's name, which is free in the tests' store."""
    name = name_image()
    PLACE.mkdir(mode=0o700, exist_ok=True)
    with (PLACE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        names = _run_podman("images", "--format", "{{.Repository}}:{{.Tag}}").split()
        if name in names:
            return
        if names:  # images of earlier versions of this module, and unnamed ones of killed tests
            _run_podman("rmi", "--force", "--all")
        with tempfile.TemporaryDirectory(dir=PLACE) as folder:
            root = Path(folder, "root")
            _fill_root(root)
            archive = Path(folder, "root.tar")
            subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True, timeout=100)
            _run_podman("import", "--quiet", str(archive), name)
        _run_podman("tag", name, DEFAULT_IMAGE)


def _fill_root(root: Path) -> None:
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    library = sysconfig.get_path("stdlib")
    shutil.copytree(library, f"{root}{library}", ignore=shutil.ignore_patterns(*LEFT_OUT, "config-*"))
    site = Path(sysconfig.get_path("purelib", vars={"base": sys.base_prefix}))
    if (site / "pip").is_dir():
        shutil.copytree(site / "pip", f"{root}{site}/pip", ignore=shutil.ignore_patterns("__pycache__"))
    programs = [python, *filter(None, map(shutil.which, PROGRAMS))]
    for program in [*programs, *map(str, Path(library, "lib-dynload").iterdir())]:
        for path in [program, *_list_libraries(program)]:
            target = Path(f"{root}{path}")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    (root / "usr/local/bin").mkdir(parents=True)
    (root / "usr/local/bin/python3").symlink_to(python)
    if not (root / "bin").exists():
        (root / "bin").symlink_to("usr/bin")
    for name in ("tmp", "proc", "sys", "dev", "run", "etc", "root", "var/tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())):
        folder.chmod(folder.stat().st_mode | 0o555)  # Python may be below a private home


def _list_libraries(program: str) -> list[str]:
    done = subprocess.run(["ldd", program], check=False, capture_output=True, text=True, timeout=20).stdout
    return re.findall(r"(/\S+) \(0x", done)
