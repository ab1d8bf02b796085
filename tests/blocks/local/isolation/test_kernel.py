"""System calls and privileges that a local sandbox denies, on each isolation level."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ..boxes import Box


@pytest.mark.older_kernels(0, 1)
def test_code_cannot_create_a_namespace(box: Box) -> None:
    attempts = box.run_attempts("""
import subprocess
NEW = {"mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000,
       "pid": 0x20000000, "net": 0x40000000, "time": 0x80}
for name, flag in NEW.items():
    attempt(f"unshare {name}", lambda: call("unshare", flag))
    attempt(f"unshare {name} with user", lambda: call("unshare", flag | 0x10000000))
    def clone():
        pid = call("clone", flag | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    if name != "time":  # the bit belongs to the signal there
        attempt(f"clone {name}", clone)
    def clone3():
        arguments = struct.pack("8Q", flag, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
        pid = call("clone3", arguments, len(arguments))
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    attempt(f"clone3 {name}", clone3)
def command():
    if subprocess.run(["unshare", "--user", "--map-root-user", "true"], stderr=subprocess.DEVNULL).returncode:
        raise OSError(1, "refused")
attempt("unshare --user", command)
""")
    assert attempts.done == {}


@pytest.mark.older_kernels(0, 1)
def test_system_calls_that_bypass_the_policy_are_refused(box: Box) -> None:
    attempts = box.run_attempts("""
bad = -1
NAMES = ("io_uring_setup", "io_uring_enter", "io_uring_register", "bpf", "perf_event_open", "userfaultfd", "add_key",
         "request_key", "keyctl", "open_by_handle_at", "name_to_handle_at", "fanotify_init", "mount", "umount2",
         "pivot_root", "chroot", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr",
         "open_tree_attr", "setns", "unshare", "ptrace", "kcmp", "process_vm_readv", "process_vm_writev",
         "process_madvise", "pidfd_getfd", "init_module", "finit_module", "delete_module", "kexec_load",
         "kexec_file_load", "swapon", "swapoff", "acct", "quotactl", "quotactl_fd", "settimeofday", "clock_settime",
         "clock_adjtime", "adjtimex", "syslog", "sethostname", "setdomainname", "iopl", "ioperm", "io_setup",
         "memfd_secret", "modify_ldt", "uselib", "ustat", "sysfs", "fanotify_mark", "process_mrelease", "statmount",
         "listmount", "lsm_set_self_attr", "get_robust_list", "setxattrat", "file_setattr")
for name in NAMES:
    if name in numbers:
        attempt(name, lambda: call(name, bad, bad, bad, bad, bad, bad))
attempt("typing into a terminal", lambda: fcntl.ioctl(0, 0x5412, b"x"))
def become_a_sibling():
    if call("clone", 0x8000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:  # CLONE_PARENT
        os._exit(0)
attempt("programs laid out as an attacker likes it", lambda: call("personality", 0x40000))  # ADDR_NO_RANDOMIZE
attempt("a child of the supervisor's", become_a_sibling)
""")
    assert attempts.done == {}
    # Any other error would mean that the kernel accepted the call and checked its arguments.
    assert {name: error for name, error in attempts.refused.items() if error not in ("EPERM", "ENOSYS")} == {}


FLAGS = """
with open("file", "w"):
    pass
descriptor = os.open("file", os.O_RDONLY)
flags = bytearray(8)
attempt("attributes read", lambda: fcntl.ioctl(descriptor, 0x80086601, flags))  # FS_IOC_GETFLAGS
attempt("attributes written", lambda: fcntl.ioctl(descriptor, 0x40086602, bytes(flags)))  # FS_IOC_SETFLAGS
attempt("a request that nobody knows", lambda: fcntl.ioctl(descriptor, 0x50009401, bytes(1000)))
"""


@pytest.mark.older_kernels(0, 1, 4)
def test_an_ioctl_cannot_change_a_file_opened_for_reading(box: Box) -> None:
    """Landlock does not restrict ioctl requests, and the interpreter's files may belong to the code's user."""
    attempts = box.run_attempts(FLAGS)
    assert {name: attempts.refused.get(name) for name in ("attributes written", "a request that nobody knows")} == {
        "attributes written": "ENOTTY",
        "a request that nobody knows": "ENOTTY",
    }
    works = box.run_attempts("""
reads, writes = os.pipe()
os.write(writes, b"four")
attempt("how much there is", lambda: fcntl.ioctl(reads, 0x541B, bytes(4)))
attempt("closed in a new program", lambda: fcntl.ioctl(reads, 0x5451))
attempt("non-blocking", lambda: os.set_blocking(reads, False))
""")
    assert works.refused == {}
    assert works.done["how much there is"] == repr((4).to_bytes(4, "little"))


@pytest.mark.older_kernels(0, 1, 5)
def test_code_cannot_take_names_of_the_hosts_sockets(box: Box) -> None:
    attempts = box.run_attempts("""
ours, theirs = socket.socketpair()
attempt("an abstract name", lambda: ours.bind("\\0rlm-batch-" + os.urandom(6).hex()))
""")
    assert box.level == "bubblewrap" or attempts.refused == {"an abstract name": "EPERM"}


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="there is no filter for it")
def test_code_cannot_remove_the_mark_of_its_processes(box: Box) -> None:
    attempts = box.run_attempts("""
import resource
soft, hard = resource.getrlimit(resource.RLIMIT_RSS)
attempt("lowered", lambda: resource.setrlimit(resource.RLIMIT_RSS, (1, 1)))
attempt("lowered of itself", lambda: resource.prlimit(os.getpid(), resource.RLIMIT_RSS, (soft, hard - 1)))
attempt("lowered by the old call", lambda: call("setrlimit", 5, struct.pack("QQ", 1, 1)))
""")
    assert attempts.done == {}
    assert {*attempts.refused.values()} <= {"EPERM", "not allowed to raise maximum limit"}


def test_system_calls_of_another_architecture_are_refused(box: Box) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("this machine has one set of numbers")
    attempts = box.run_attempts('attempt("x32", lambda: checked(libc.syscall(ctypes.c_long(0x40000000 + 39))))')
    assert attempts.refused == {"x32": "EPERM"}
    answer = box.run("""
import mmap
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
SUBMIT(pid=function())
""")
    assert answer["error"]["error"] == "CodeCrashed", answer
    assert box.outputs("SUBMIT(works=True)") == {"works": True}


def test_code_has_no_privileges_and_cannot_gain_any(box: Box) -> None:
    outputs = box.outputs("""
import glob, stat, subprocess
header = struct.pack("Ii", 0x20080522, 0)
sets = ctypes.create_string_buffer(24)
call("capget", header, sets)
words = struct.unpack("6I", sets.raw)
capabilities = words[0] | words[1] | words[3] << 32 | words[4] << 32
setuid = [path for place in ("/usr/bin", "/bin", "/usr/sbin", "/sbin") for path in glob.glob(place + "/*")
          if os.path.isfile(path) and os.stat(path).st_mode & stat.S_ISUID]
became = {}
for command in ("su -c id", "sudo -n id", "mount -t tmpfs none /mnt", "pkexec id", "newgrp root"):
    command = command.split()
    try:
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        became[command[0]] = ran.returncode, ran.stdout.decode()
    except (OSError, subprocess.TimeoutExpired):
        pass
for function, value in ((os.setuid, 0), (os.setgid, 0), (os.setuid, 1), (os.seteuid, 0), (os.setgroups, [0])):
    attempt(function.__name__, lambda: function(value))
SUBMIT(uid=os.getresuid(), groups=os.getgroups(), no_new=libc.prctl(39, 0, 0, 0, 0), capabilities=capabilities,
       became=became, done=done)
""")
    root = box.host.uid == 0
    assert (outputs["uid"][0] > 1000) if root else (outputs["uid"] == [box.host.uid] * 3)
    assert len(set(outputs["uid"])) == 1
    assert outputs["no_new"] == 1
    # If root's interpreter is in a private directory, code keeps the capability to search directories.
    assert outputs["capabilities"] in ((0, 1 << 2) if root and box.level == "landlock" else (0,))
    assert {name: outcome for name, outcome in outputs["became"].items() if outcome[0] == 0} == {}
    assert outputs["done"] == {}
    assert root is False or outputs["groups"] in ([], [outputs["uid"][0]])


def test_code_has_no_descriptors_of_the_host(box: Box) -> None:
    outputs = box.outputs("""
import stat
kinds = {}
for fd in range(4096):
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        continue
    kinds[str(fd)] = "pipe" if stat.S_ISFIFO(mode) else "device" if stat.S_ISCHR(mode) else oct(mode)
SUBMIT(kinds=kinds)
""")
    # Standard input, output and error, and the channel of the execution.
    assert outputs["kinds"] == {"0": "device", "1": "pipe", "2": "pipe", "3": "pipe", "4": "pipe"}
