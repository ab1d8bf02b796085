"""Code that the host and the driver share: strict JSON, frames, names and limits. Standard library, Python 3.9."""
