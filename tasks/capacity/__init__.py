"""Limits on open sandboxes: those of a provider over runs and machines, and the ramp-up within one run."""
