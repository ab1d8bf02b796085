"""The host's side of queries: what code may ask of a language model, what it costs, and what became of it."""
