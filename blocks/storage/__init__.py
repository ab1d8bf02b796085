"""File storage: locations that fsspec reaches, local copies of them, and directories on this machine."""
