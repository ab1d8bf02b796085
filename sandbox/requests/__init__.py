"""Encoding of an execution's code and variables for a sandbox."""
