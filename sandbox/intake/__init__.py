"""The host's handling of untrusted data from a sandbox, within limits on its amount and its rate."""
