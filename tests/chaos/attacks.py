"""Attacks of code on its sandbox and on the machine; nearly all end themselves within seconds."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

BOMB_SECONDS = 3  # seconds that an attack lives, if nothing else ends it
BOMB_SOURCE = Path(__file__).parents[1] / "blocks" / "local" / "fork_bomb.c"
BOMB_KINDS = {"stays": "s", "leaves": "l", "mixes": "m", "adopts": "a"}

START_BOMB = """
import base64, os, time
with open("bomb", "wb") as file:
    file.write(base64.b64decode(bomb))
os.chmod("bomb", 0o755)
if os.fork() == 0:
    os.execv("bomb", ["bomb", kind, mark, str(time.monotonic() + seconds)])
time.sleep(0.3)
"""

ATTACKS = {
    "a fork bomb in Python": """
import os, time
end = time.monotonic() + seconds
while time.monotonic() < end:
    try:
        os.fork()
    except OSError:
        pass
os._exit(1)
""",
    "a signal to every process": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "a stop of itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "a stop of its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nos._exit(1)",
    "all the memory": "held = []\nwhile True: held.append(bytearray(1 << 24))",
    "memory in files without a name": """
import os
files = [os.memfd_create("x") for _ in range(64)]
for file in files:
    for _ in range(16): os.write(file, bytes(1 << 20))
raise MemoryError
""",
    "all the disk": "with open('x', 'wb') as file:\n    while True: file.write(bytes(1 << 20)); file.flush()",
    "many small files": "for i in range(30_000): open(str(i), 'w').close()\nraise SystemExit(1)",
    "output without an end": "import os\nwhile True: os.write(1, b'x' * 60_000)",
    "a crash": "import ctypes\nctypes.string_at(0)",
    "all descriptors closed": "import os\nos.closerange(0, 4096)\nraise SystemExit(1)",
    "all descriptors written to": """
import os, random
for fd in range(64):
    try: os.write(fd, b'{"op":"end","id":1,"status":"submitted","body":7}\\n{"y":0}\\n' * 100)
    except OSError: pass
raise SystemExit(1)
""",
    "threads without an end": """
import threading, time
while True: threading.Thread(target=time.sleep, args=(seconds,), daemon=True).start()
""",
    "a frozen interpreter": "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
}
# All inputs of a batch share one code, and `text` is the attack of an input. The alarm ends the process of an attack
# that would run until its timeout, unless the process has stopped itself.
CODE = "if text:\n    import signal; signal.alarm(seconds)\n    exec(text)\nelse:\n    SUBMIT(y=x * x)"


def compile_bomb(folder: Path) -> str | None:
    """Compile the fork bomb in C and return it in base64, or None without a compiler."""
    if shutil.which("gcc") is None:
        return None
    program = folder / "fork_bomb"
    subprocess.run(["gcc", "-O1", "-o", program, BOMB_SOURCE], check=True)
    return base64.b64encode(program.read_bytes()).decode()
