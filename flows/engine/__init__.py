"""One flow run: its executor, the outcomes, the cache of earlier results, and what whoever watches is told."""
