"""A flow's inputs: lists and files of variables, chunks of data, and parameters that are too long for Prefect."""
