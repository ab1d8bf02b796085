"""Compilation and evaluation of code: the value of its last expression, and top-level await."""
