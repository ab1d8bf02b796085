"""Readings cleaned in chunks, a file each on a volume, and read home from there."""

import csv
import io

from rlm_batch import Volume, chunks

CLEAN = """
import csv
import io

text = io.StringIO()
csv.writer(text).writerows([name, (f - 32) / 1.8] for name, f in data if f is not None)
path = save_to_volume(f"clean/{data[0][0]}.csv", text.getvalue())
SUBMIT(rows=text.getvalue().count("\\n"))
"""
readings = [[f"s{number}", None if number == 3 else 32 + 18 * number] for number in range(6)]
report = chunks.sync(CLEAN, data=readings, chunk_size=2, volume_name="readings")
assert sum(result.rows for result in report.results.values()) == 5

volume = Volume("readings")
files = volume.ls("clean")
print(files)
assert [file.path for file in files] == ["clean/s0.csv", "clean/s2.csv", "clean/s4.csv"]
celsius: dict[str, float] = {}
for file in files:
    text = volume.get(file.path).decode()
    celsius |= {sensor: round(float(value)) for sensor, value in csv.reader(io.StringIO(text))}
assert celsius == {"s0": 0, "s1": 10, "s2": 20, "s4": 40, "s5": 50}
