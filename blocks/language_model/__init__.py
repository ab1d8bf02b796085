"""The language model that sandboxed code may query, and recursive queries over it."""
