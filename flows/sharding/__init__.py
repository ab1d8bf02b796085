"""A job in shards, each of which is a flow run on a work pool."""
