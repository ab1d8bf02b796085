"""Files of the host that sandboxes get besides what their provider gives them."""
