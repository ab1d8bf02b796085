"""A sandbox that is used step by step, whose names stay from call to call."""
