"""The rows of a CSV file as inputs, results into a DataFrame."""

import asyncio
from pathlib import Path

import pandas as pd

from rlm_batch import batch

Path("trips.csv").write_text("city,km,electric\nOslo,12.5,true\nBern,3,false\n")
results = asyncio.run(batch("SUBMIT(city=city, cost=km * (0.1 if electric else 0.3))", inputs=Path("trips.csv")))
frame = pd.DataFrame([dict(result.outputs) for result in results])
print(frame)
assert frame["cost"].round(2).tolist() == [1.25, 0.9]
