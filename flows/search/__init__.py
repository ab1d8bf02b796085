"""Sweeps that search: the space, samplers and pruners, and the record that a killed search resumes from."""
