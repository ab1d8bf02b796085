"""Substitutes for Modal's own programs in a sandbox."""

# Substitute for Modal's `sync` in a sandbox: for a volume's mount it waits for the commit, else it does nothing.
SYNC = """#!{python} -IS
import os, socket, sys
for mount in sys.argv[1:]:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect({socket!r})
        line.sendall(("{box} " + os.path.abspath(mount) + "\\n").encode())
        answer = line.makefile().readline().strip()
    if answer != "ok":
        sys.exit("sync: " + (answer or "no answer"))
"""

# Substitute for the program that the client's file calls run.
TOOLS = """#!{python} -IS
import json, os, shutil, stat, sys
kinds = {{FileNotFoundError: "NotFound", IsADirectoryError: "IsDirectory", NotADirectoryError: "NotDirectory",
         PermissionError: "PermissionDenied", FileExistsError: "AlreadyExists"}}
(name, options), = json.loads(sys.argv[1]).items()
try:
    path = options["path"]
    if name == "WriteFile":
        os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
        with open(path, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
    elif name == "ReadFile":
        with open(path, "rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
    elif name == "Stat":
        status = os.lstat(path)
        type = "directory" if stat.S_ISDIR(status.st_mode) else "symlink" if stat.S_ISLNK(status.st_mode) else "file"
        print(json.dumps({{
            "name": os.path.basename(path), "path": path, "type": type, "size": status.st_size, "mode": status.st_mode,
            "permissions": stat.filemode(status.st_mode), "owner": "root", "group": "root",
            "modified_time": status.st_mtime,
        }}))
    else:
        sys.exit(json.dumps({{"error_kind": "Other", "message": name + " is not modelled"}}))
except OSError as error:
    sys.exit(json.dumps({{"error_kind": kinds.get(type(error), "Other"), "message": error.strerror or str(error)}}))
"""
