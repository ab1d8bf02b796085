"""Limits on open sandboxes: a provider's limits over all runs and machines, and the gradual start within one run."""
