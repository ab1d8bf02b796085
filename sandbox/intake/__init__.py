"""What the host takes of a sandbox, and how much of it at a time: code may send whatever it likes."""
