"""A log cut into chunks, counted in parallel and reduced to one table."""

import asyncio
from pathlib import Path

from rlm_batch import chunks

lines = [f'{{"level": "{level}"}}' for level in ["INFO"] * 70 + ["ERROR"] * 5]
Path("log.jsonl").write_text("\n".join(lines))
COUNT = "from collections import Counter\nSUBMIT(counts=dict(Counter(line['level'] for line in data)))"
REDUCE = """
from collections import Counter
total = Counter()
for fields in results.values():
    total.update(fields["counts"])
SUBMIT(**total)
"""
report = asyncio.run(chunks(COUNT, data="log.jsonl", chunk_size=20, reduce=REDUCE))
print(report)
assert report.reduction.outputs == {"INFO": 70, "ERROR": 5}
