"""Code that searches a sandbox with a clone for secrets: its files, and the environments and arguments of processes."""

SEARCH = """
import glob, os
from helper_of_the_repository import NAME
words = ["".join(pair).encode() for pair in halves]
patterns = ("**/*", os.path.expanduser("~/*"), "/tmp/**/*", "/proc/[0-9]*/environ", "/proc/[0-9]*/cmdline")
places = [path for pattern in patterns
          for path in glob.glob(pattern, recursive=True, include_hidden=True)]
found = []
for path in places:
    try:
        if os.path.isfile(path) and any(word in open(path, "rb").read() for word in words):
            found.append(path)
    except OSError:
        pass
SUBMIT(found=found, name=NAME, looked=len(places))
"""


def halve(*secrets: str) -> list[list[str]]:
    """Return each secret in halves: the search would find its own variables."""
    return [[text[:8], text[8:]] for text in secrets]
