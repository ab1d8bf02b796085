"""A chunked job that doubles numbers onto a volume and adds them up."""

DOUBLE = """
import json
save_to_volume(f"results/chunk_{chunk_id}.json", json.dumps([x * 2 for x in data]))
SUBMIT(chunk_id=chunk_id, count=len(data))
"""
SUM = """
import json
parts = [json.loads(load_from_volume(path)) for path in list_volume("results")]
SUBMIT(total=sum(map(sum, parts)), files=len(parts), counts={name: fields["count"] for name, fields in results.items()})
"""
THREE = {0: [1, 2, 3], 1: [4, 5, 6], 2: [7, 8, 9]}
