"""Decoding of an execution's outcome from untrusted data, and escaping of text for display."""
