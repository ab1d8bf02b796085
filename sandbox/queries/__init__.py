"""The host's side of language model queries: their limits, their cost and their record."""
