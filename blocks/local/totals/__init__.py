"""Limits for a local sandbox as a whole: by control groups where they may be used, else by a thread that kills."""
