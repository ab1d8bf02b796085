"""The language model that sandboxed code may query, and recursive queries to it."""
