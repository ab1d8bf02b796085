"""Wheels of one module each, which pip installs without a network."""

from __future__ import annotations

import zipfile
from pathlib import Path


def write_wheel(folder: Path, name: str, needs: str = "") -> Path:
    """Write the wheel of a package, whose module defines NAME and which `needs` another; return its path."""
    path, metadata = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", f"NAME = {name!r}\n")
        requires = f"Requires-Dist: {needs}\n" if needs else ""
        wheel.writestr(f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}")
        wheel.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{metadata}/RECORD", "")
    return path
