"""Files of the host that sandboxes can use: modules on the Python path, mounts, and cached repositories."""
