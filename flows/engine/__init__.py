"""One flow run: its executor, its outcomes, the cache of earlier results, and its events for observers."""
