"""Where files are kept: locations that fsspec knows, local mirrors of them, and directories of the user's."""
