"""The commands of `setup` and pip's, and how a sandbox runs them."""

import shlex

# Python in an image, whose settings of pip must not decide where or whether pip installs.
PYTHON_FOR_PIP = ["env", *(f"-uPIP_{name}" for name in ("TARGET", "PREFIX", "ROOT", "USER"))]
PYTHON_FOR_PIP += ["PIP_DRY_RUN=0", "PIP_NO_DEPS=0", "PIP_REQUIRE_VIRTUALENV=0"]
PYTHON_FOR_PIP += ["PIP_BREAK_SYSTEM_PACKAGES=1", "python3"]  # Debian's Python belongs to the image alone.
# A program for `sh -c` with commands. It runs them as root if it may, and ends at the first that fails.
RUN_AS_ROOT = """
if [ "$(id -u)" != 0 ] && sudo -n true 2>/dev/null; then
sudo -n sh -e -c "$1"
else sh -e -c "$1"; fi
"""


def build_image_command(commands: str) -> str:
    """Return a shell command of one line for an image's build, whose file allows no line breaks in a command."""
    text = commands.replace("\\", "\\\\").replace("\n", "\\n")
    return f'sh -e -c "$(printf %b {shlex.quote(text)})"'
