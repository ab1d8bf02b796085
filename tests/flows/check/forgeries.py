"""Code that tries to pass a check without the answer. No attempt knows the text `SECRET`, which only the check has.

Each attempt ends by itself, or at the execution's timeout of a few seconds.
"""

SECRET = "the answer that only the check knows"

# Passes if the code has submitted the secret and written it to a file. It uses modules and builtins that attempts fake,
# and submits in `reached` what of the judged code has reached it.
CHECK = f"""
import builtins, calendar, json, os, subprocess, sys, tempfile
answer = None
try:
    with open(os.path.join(folder, "answer.json")) as file:
        answer = json.load(file)
except (OSError, ValueError):
    pass
printed = subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True).stdout
reached = [name for name, is_reached in {{
    "module": calendar.timegm((1970, 1, 1, 0, 0, 1)) != 1 or hasattr(os, "EVIL") or json.loads("[1]") != [1],
    "builtins": len("four") != 4 or hasattr(builtins, "EVIL"),
    "environment": "EVIL" in os.environ,
    "child": printed != "child\\n",
    "temporary file": "left" in os.listdir(tempfile.gettempdir()),
    "path": any("execution-files" in path for path in sys.path),
    "working folder": set(os.listdir(".")) - {{"execution-files"}} != set(),
    "link": any(os.path.islink(os.path.join(folder, name)) for name in os.listdir(folder)),
}}.items() if is_reached]
secret = {SECRET!r}
SUBMIT(passed=answer == secret and submitted.get("answer") == secret, reached=reached)
"""
HONEST = f"""
import json
with open("answer.json", "w") as file:
    json.dump({SECRET!r}, file)
SUBMIT(answer={SECRET!r})
"""

# Attempts by what the code submits and how it ends.
ENDINGS = {
    "submit the verdict": "SUBMIT(passed=True, reached=[])",
    "submit the verdict as the only value": "SUBMIT({'passed': True})",
    "submit twice": "try:\n    SUBMIT(passed=False)\nfinally:\n    SUBMIT(passed=True)",
    "exit with success": "import sys\nsys.exit(0)",
    "exit without Python's end": "import os\nos._exit(0)",
    "raise a verdict": "raise AssertionError('passed=True')",
    "raise an error that prints itself as none": (
        "class Odd(Exception):\n    def __str__(self): return ''\n    __repr__ = __str__\nraise Odd"
    ),
    "submit a true-like object": (
        "class All(dict):\n    def get(self, *_): return self\n    __eq__ = lambda *_: True\nSUBMIT(All(answer=1))"
    ),
    "submit the names of the check's variables": (
        "SUBMIT(submitted={'answer': 1}, stdout='', error=None, seconds=0.0, folder='/tmp', passed=True)"
    ),
    "submit odd field names": "SUBMIT(**{'__class__': 1, '': 2, 'get': 3, 'a\\nb': 4, '</td>': 5, 'passed': True})",
    "run into the timeout": "import time\nprint('passed=True', flush=True)\ntime.sleep(1000)",
}
# Attempts by text on the standard streams and on descriptors.
STREAMS = {
    "print a verdict": "print('passed=True')\nprint('1 passed in 0.01s')",
    "print what looks like a frame": (
        'print(\'{"op":"end","id":1,"status":"submitted","body":15}\\n{"passed":true}\')'
    ),
    "write frames to all descriptors": """
import os
frame = b'{"op":"end","id":1,"status":"submitted","body":15}\\n{"passed":true}'
for fd in range(3, 64):
    try: os.write(fd, frame)
    except OSError: pass
""",
    "close all descriptors": "import os\nos.closerange(0, 1024)",
}
# Attempts by changes of the process and its interpreter.
PATCHES = {
    "patch builtins": (
        "import builtins\nbuiltins.EVIL = 1\nbuiltins.len = lambda _: 4\nbuiltins.open = None\nSUBMIT(answer='x')"
    ),
    "patch json and calendar": (
        "import json, calendar\njson.loads = lambda *_: 1\ncalendar.timegm = lambda *_: 9\nSUBMIT(answer='x')"
    ),
    "patch subprocess and os": (
        "import os, subprocess\nsubprocess.run = None\nos.environ['EVIL'] = '1'\n"
        "os.putenv('EVIL', '1')\nSUBMIT(answer='x')"
    ),
    "replace SUBMIT": "def SUBMIT(**fields): pass\n__builtins__['SUBMIT'] = SUBMIT\nSUBMIT(passed=True)",
    "trace and audit hooks": (
        "import sys, threading\nsys.settrace(lambda *_: None)\nsys.addaudithook(lambda *_: None)\n"
        "sys.excepthook = lambda *_: None\nSUBMIT(answer='x')"
    ),
    "an import hook": (
        "import sys\nclass Finder:\n    def find_spec(self, *_): return None\nsys.meta_path.insert(0, Finder())\n"
        "sys.path.insert(0, '.')\nSUBMIT(answer='x')"
    ),
    "an atexit function that submits": "import atexit\natexit.register(lambda: SUBMIT(passed=True))",
    "a finalizer that submits": "class Last:\n    def __del__(self): SUBMIT(passed=True)\nlast = Last()",
    "a thread that submits later": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.3), SUBMIT(passed=True))).start()"
    ),
    "search the frames for the driver": """
import gc, sys
for found in gc.get_objects():
    if isinstance(found, dict) and 'passed' in found: found['passed'] = True
frame = sys._getframe()
while frame is not None:
    frame.f_locals.update(passed=True, status='submitted')
    frame = frame.f_back
SUBMIT(passed=True)
""",
}
# Attempts by files in the working folder and elsewhere.
FILES = {
    "fake modules": """
for name in "pytest calendar json subprocess sitecustomize usercustomize os conftest __main__".split():
    with open(name + ".py", "w") as file: file.write("import builtins; builtins.EVIL = 1\\nSUBMIT(passed=True)\\n")
""",
    "a fake package in the user's site": """
import os, site, sys
for place in (site.getusersitepackages(), os.path.expanduser("~"), *sys.path):
    for name in ("sitecustomize.py", "usercustomize.py", "evil.pth", "calendar.py"):
        try:
            os.makedirs(place, exist_ok=True)
            open(os.path.join(place, name), "w").write("import builtins; builtins.EVIL = 1")
        except OSError: pass
""",
    "a file with a wrong answer": "open('answer.json', 'w').write('\"passed\"')\nSUBMIT(answer='passed')",
    "a link to a file of the system": "import os\nos.symlink('/etc/passwd', 'answer.json')\nSUBMIT(answer='x')",
    "a link to a directory": "import os\nos.symlink('/', 'root')\nos.symlink('..', 'up')\nSUBMIT(answer='x')",
    "a link to the process": "import os\nos.symlink('/proc/self/fd/0', 'answer.json')\nos.symlink('loop', 'loop')",
    "a hard link": """
import os
for target in ('/etc/passwd', '/proc/self/environ', os.__file__):
    try: os.link(target, 'answer.json')
    except OSError: pass
""",
    "a named pipe": "import os\ntry: os.mkfifo('answer.json')\nexcept OSError: pass\nSUBMIT(answer='x')",
    "a socket": (
        "import socket\ntry: socket.socket(socket.AF_UNIX).bind('answer.json')\nexcept OSError: pass\n"
        "SUBMIT(answer='x')"
    ),
    "a directory as the file": "import os\nos.makedirs('answer.json/answer.json')\nSUBMIT(answer='x')",
    "names with newlines and escapes": """
import os
for name in ("a\\nb", "\\x1b[2J", "..\\\\answer.json", "-rf", "answer.json ", b"\\xff"):
    try: open(name, "w").write("x")
    except (OSError, ValueError): pass
""",
    "names that leave a ZIP archive": """
import os
os.makedirs("C:/x")
for name in ("C:/x/answer.json", "~", "$HOME", "%2e%2e", "\\uff0e\\uff0e"):
    open(name, "w").write("x")
""",
    "many files": "for n in range(1_500): open(f'f{n}', 'w').write('x')",
    "a sparse file": (
        "import os\nopen('answer.json', 'w').close()\nos.truncate('answer.json', 200 << 20)\nSUBMIT(answer='x')"
    ),
    "deep directories": (
        "import os\nos.makedirs('/'.join(['d'] * 60))\nopen('/'.join(['d'] * 60) + '/f', 'w').write('x')"
    ),
    "a file that nobody may read": "import os\nopen('answer.json', 'w').write('x')\nos.chmod('answer.json', 0)",
    "a folder that nobody may enter": "import os\nos.mkdir('d')\nos.chmod('.', 0)",
    "the check's own names": """
import os
os.mkdir("execution-files")
for name in ("execution-files/answer.json", "execution-files.zip"):
    open(name, "w").write("x")
""",
    "a working folder that is gone": (
        "import os, shutil\nshutil.rmtree(os.getcwd(), ignore_errors=True)\nSUBMIT(answer='x')"
    ),
    "files in the folder for temporary files": (
        "import os, tempfile\nopen(os.path.join(tempfile.gettempdir(), 'left'), 'w').write('x')\nSUBMIT(answer='x')"
    ),
}
# Attempts by other processes.
PROCESSES = {
    "a process that stays and swaps the file": """
import os, time
open("answer.json", "w").write("1")
if os.fork() == 0:
    os.setsid()
    for n in range(100):
        open("answer.json", "w").write(str(n))
        time.sleep(0.02)
    os._exit(0)
SUBMIT(answer='x')
""",
    "a daemon of two forks that submits": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(0.3)
        SUBMIT(passed=True)
    os._exit(0)
""",
    "a copy of the process that submits": "import os\nos.fork()\nSUBMIT(passed=True)",
    "a signal to the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\nSUBMIT(passed=True)",
    "signals to all processes": (
        "import os, signal\ntry: os.kill(-1, signal.SIGSTOP)\nexcept OSError: pass\nSUBMIT(passed=True)"
    ),
    "a kill of itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "a look for other processes' memory": """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("mem", "environ", "fd/0", "cwd/answer.json"):
        try:
            with open(f"/proc/{pid}/{name}", "r+b" if name == "mem" else "rb") as file: file.read(1)
        except (OSError, ValueError): pass
SUBMIT(passed=True)
""",
    "a change of the module on disk": """
import os, calendar
for name in (calendar.__file__, os.__file__):
    try: open(name, "a").write("\\nEVIL = 1")
    except OSError: pass
SUBMIT(answer='x')
""",
}
# Attempts of someone who had read only the documentation: at the driver's memory, descriptors and values, and by races.
REACHES = {
    "a value that changes the frames while it is encoded": """
import sys
class Value:
    def tolist(self):
        frame = sys._getframe()
        while frame:
            for fields in list(frame.f_locals.values()):
                if isinstance(fields, dict): fields.update(passed=True, reached=[], status="submitted")
            frame = frame.f_back
        return [1]
SUBMIT(answer=Value())
""",
    "a text that equals all others": (
        "class All(str):\n    __eq__ = lambda *_: True\n    __hash__ = str.__hash__\nSUBMIT(answer=All('x'))"
    ),
    "False rewritten to True in memory": "import ctypes\nctypes.memmove(id(False), id(True), 28)\nSUBMIT(answer='x')",
    "an encoder that writes a verdict": """
import json, os
json.dumps = json.JSONEncoder.encode = lambda *_, **__: '{"passed":true,"reached":[]}'
write = os.write
os.write = lambda fd, data: write(fd, bytes(data).replace(b"answer", b"passed"))
SUBMIT(answer='x')
""",
    "the globals and the closure of SUBMIT": """
function = getattr(SUBMIT, "__func__", SUBMIT)
for cell in getattr(function, "__closure__", None) or ():
    if isinstance(cell.cell_contents, dict): cell.cell_contents.update(passed=True, reached=[])
scope = getattr(function, "__globals__", {})
for name in list(scope):
    if callable(scope[name]) and name.startswith(("check", "encode", "send")): scope[name] = lambda *_, **__: None
SUBMIT(answer='x')
""",
    "another program that writes frames": """
import os, sys
frame = '{"op":"end","id":1,"status":"submitted","body":15}\\\\n{"passed":true}'
for fd in range(3, 64):
    try: os.set_inheritable(fd, True)
    except OSError: pass
program = f"import os\\nfor fd in range(64):\\n  try: os.write(fd, b'{frame}')\\n  except OSError: pass"
os.execv(sys.executable, [sys.executable, "-c", program])
""",
    "frames to the parent's descriptors": """
import ctypes, os
libc, parent = ctypes.CDLL(None), os.getppid()
for fd in range(32):
    try: os.write(os.open(f"/proc/{parent}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK), b'{"passed":true}')
    except OSError: pass
handle = libc.syscall(434, parent, 0)
for fd in range(32):
    try: os.write(libc.syscall(438, handle, fd, 0), b'{"passed":true}')
    except OSError: pass
SUBMIT(answer='x')
""",
    "the secret in the memory of all processes": """
import ctypes, os, re
libc = ctypes.CDLL(None)
libc.ptrace(16, os.getppid(), 0, 0)
for pid in ("self", *filter(str.isdigit, os.listdir("/proc"))):
    try:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for line in maps:
                low, high = (int(part, 16) for part in line.split()[0].split("-"))
                try:
                    memory.seek(low)
                    found = re.search(b"the answer that only the [c]heck knows", memory.read(min(high - low, 1 << 24)))
                except (OSError, ValueError, OverflowError): continue
                if found:
                    open("answer.json", "w").write('"' + found[0].decode() + '"')
                    SUBMIT(answer=found[0].decode())
    except OSError: pass
""",
    "the secret in files": """
import os, re, time
end = time.monotonic() + 5
for place in ("..", "/tmp", "/dev/shm", "/run", "/var/tmp", os.path.expanduser("~")):
    for directory, _, names in os.walk(place):
        for name in names if time.monotonic() < end else ():
            try:
                fd = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_NONBLOCK)
                found = re.search(b"the answer that only the [c]heck knows", os.read(fd, 1 << 20))
                os.close(fd)
                if found:
                    open("answer.json", "w").write('"' + found[0].decode() + '"')
                    SUBMIT(answer=found[0].decode())
            except OSError: pass
""",
    "a folder and a link that a process exchanges": """
import ctypes, os
libc, here = ctypes.CDLL(None), os.getcwd().encode()
os.mkdir("sub"), open("sub/hostname", "w").close(), os.symlink("/etc", "link")
if os.fork() == 0:
    os.setsid()
    for _ in range(100_000): libc.syscall(316, -100, here + b"/sub", -100, here + b"/link", 2)
    os._exit(0)
SUBMIT(answer='x')
""",
    "a shared mapping that a process changes": """
import mmap, os
file = open("answer.json", "w+b")
file.write(b"0" * 8), file.flush()
area = mmap.mmap(file.fileno(), 8)
if os.fork() == 0:
    os.setsid()
    for n in range(10_000_000): area[:] = b"%08d" % n
    os._exit(0)
SUBMIT(answer='x')
""",
    "a process that outlives its parent and submits": """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.prctl(36, 1, 0, 0, 0)
if os.fork() == 0:
    os.setsid(), libc.prctl(1, 0, 0, 0, 0), time.sleep(0.3)
    SUBMIT(passed=True, reached=[])
SUBMIT(answer='x')
""",
    "its own namespaces and mounts": """
import ctypes
libc = ctypes.CDLL(None)
libc.unshare(0x10000000), libc.unshare(0x20000), libc.mount(b"tmpfs", b".", b"tmpfs", 0, 0), libc.chroot(b".")
SUBMIT(answer='x')
""",
    "memory that outlives a process": """
import ctypes
libc = ctypes.CDLL(None)
libc.shmget(4242, 4096, 0o1666), libc.msgget(4242, 0o1666), libc.semget(4242, 1, 0o1666)
SUBMIT(answer='x')
""",
    "a replaced main module": """
import sys, types
sys.modules["__main__"] = types.SimpleNamespace(SUBMIT=lambda **_: None, passed=True)
SUBMIT(answer='x')
""",
    "a verdict for the report": "try: report(1.0), report(passed=True)\nexcept Exception: pass\nraise SystemExit",
    "an error with a name of ours": "class CheckError(Exception): passed = True\nraise CheckError('None')",
}
FORGERIES = {**ENDINGS, **STREAMS, **PATCHES, **FILES, **PROCESSES, **REACHES}
# One attempt of each kind, for runs of the tests that take seconds.
FIRST = (
    "submit the verdict", "exit with success", "write frames to all descriptors", "patch builtins", "fake modules",
    "a link to a directory", "a hard link", "a named pipe", "names with newlines and escapes",
    "a process that stays and swaps the file",
)  # fmt: skip

# A line of a ledger with the verdict, which code can submit, print, raise, display and write to files.
LINE = (
    '{"version":1,"key":"00","at":9e9,"index":0,"attempt":1,"status":"succeeded","outputs":{"passed":true},'
    '"meta":{"variables":{},"sandbox_id":"x","submitted":true}}'
)
# Attempts that imitate lines of a ledger, verdicts, keys or errors in what the ledger stores of them.
IMITATIONS = {
    "a line in a value": f"SUBMIT(answer='x\\n' + {LINE!r} + '\\n')",
    "lines on the streams": (
        "import sys\nfor end in ('\\n', '\\r', '\\x85', '\\u2028', '\\0'):\n"
        f"    for stream in (sys.stdout, sys.stderr): stream.write(end + {LINE!r} + end)"
    ),
    "a line in an error": f"raise ValueError('\\n' + {LINE!r} + '\\n')",
    "a line in the source of a syntax error": f"x = = 1  #\n{LINE}",
    "a line in a display": (
        f"class A:\n    def _repr_mimebundle_(self, **_): return dict.fromkeys(['text/plain', 'text/html'], {LINE!r})\n"
        "display(A())"
    ),
    "a line in the repr of the last value": f"class A:\n    def __repr__(self): return '\\n' + {LINE!r}\nA()",
    "a verdict as the last value": "{'passed': True, 'outputs': {'passed': True}, 'judged': None}",
    "fields of a line": (
        "SUBMIT(key='0' * 64, status='succeeded', at=9e9, index=0, unchecked_key='1', outputs={'passed': True},"
        " meta={'judged': {'outputs': {'passed': True}, 'submitted': True, 'error': None}})"
    ),
    "a field name that ends its JSON": 'SUBMIT(**{\'x","outputs":{"passed":true},"y\': 1})',
    "a field name that becomes another": "SUBMIT(**{'\uff50assed': True})",
    "pointers of numbers that are not finite": (
        "SUBMIT(nonfinite={'/passed': 'inf'}, passed=float('inf'), **{'a/b~0': float('nan'), '/passed': float('nan')})"
    ),
    "names of the check's error": (
        "class CheckError(Exception):\n    type = 'passed'\n    meta = {'judged': None}\n    passed = True\n"
        "raise CheckError('passed=True')"
    ),
    "the name of an error of the infrastructure": (
        "raise type('SandboxLost', (Exception,), {'is_failure_of_code': False})('the sandbox is lost')"
    ),
    "an error's name that ends its JSON": (
        'raise type(\'X","judged":{"outputs":{"passed":true}},"y\', (Exception,), {})(\'z\')'
    ),
    "an exit with a verdict": "raise SystemExit('passed=True')",
    "a report as of a pruned trial": "report(1.0, 0)",
    "parts, records and folders of a ledger as files": (
        "import os\nos.makedirs('files/0')\n"
        "for name in ('part-000000000000-1.jsonl', 'run-000000000000.json', 'files/0/part-0-1.jsonl', '0'):\n"
        f"    open(name, 'w').write({LINE!r} + '\\n')"
    ),
    "names of files that end their JSON": (
        "for name in ('a\\nb', 'x\",\"judged\":null,\"y', 'passed=True', '\\u202e'): open(name, 'w').write('passed')"
    ),
    "links out of the folder": (
        "import os\nfor name, to in (('a', '/'), ('b', '/proc/self/environ'), ('c', '..')): os.symlink(to, name)"
    ),
    "integers that JSON's readers refuse": "SUBMIT(passed=10 ** 5000)",
    "text that is not UTF-8": "SUBMIT(passed=True, **{'\\udcff': '\\ud800'})",
}
