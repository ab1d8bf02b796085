"""Word counts over chunks of a text, reduced to one table. The text is the topics of Python's help().

Each chunk writes its counts to a separate file on the volume, and the reduction reads all files. A second run executes
nothing.
"""

import asyncio
from pydoc_data.topics import topics

from rlm_batch import chunks

COUNT = """
import json, re
from collections import Counter

words = Counter(re.findall(r"[a-z']+", " ".join(data).lower()))
save_to_volume(f"counts/{chunk_id}.json", json.dumps(words))
SUBMIT(topics=len(data), words=sum(words.values()))
"""
REDUCE = """
import json
from collections import Counter

total = Counter()
for chunk_id in results:
    total.update(json.loads(load_from_volume(f"counts/{chunk_id}.json")))
SUBMIT(most=total.most_common(10), words=sum(total.values()), different=len(total))
"""

if __name__ == "__main__":
    texts = [topics[name] for name in sorted(topics)]
    report = asyncio.run(chunks(COUNT, data=texts, chunk_size=10, volume_name="word-counts", reduce=REDUCE))
    print(report)
    print(f"{report.reduction.words:,} words, {report.reduction.different:,} different; the most frequent:")
    for word, count in report.reduction.most:
        print(f"{count:6,}  {word}")
