"""How many sandboxes a flow run may have open: limits over runs and machines, and the ramp-up within one."""
