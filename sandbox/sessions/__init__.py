"""Sandboxes for step-by-step use: variables of one execution exist in the next."""
