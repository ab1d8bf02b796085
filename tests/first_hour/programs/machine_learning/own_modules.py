"""Code that imports one's own package from src/, and sees an edit in the next run."""

import asyncio
from pathlib import Path

from rlm_batch import batch

package = Path("src/losses")
package.mkdir(parents=True)
(package / "__init__.py").write_text("from .squared import loss\n")
squared = package / "squared.py"
squared.write_text("def loss(x):\n    return x ** 2\n")
code, inputs = "from losses import loss\nSUBMIT(loss=loss(x))", [{"x": x} for x in (1, 2, 3)]


def run() -> list[float]:
    return [result.loss for result in asyncio.run(batch(code, inputs, python_path=["src"], cache_results=True))]


assert run() == [1, 4, 9]
squared.write_text("def loss(x):\n    return -x\n")
assert run() == [-1, -2, -3], "an edit makes other results"
