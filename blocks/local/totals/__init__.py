"""Limits for a local sandbox as a whole: by control groups if available, otherwise by a watcher thread."""
