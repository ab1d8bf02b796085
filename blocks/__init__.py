"""What a person configures: the providers of sandboxes and the language model."""
