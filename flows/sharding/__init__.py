"""A job that is cut into shards, each a flow run of its own on a work pool."""
