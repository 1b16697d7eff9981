"""Which rows match what, known after every change; and what changed. Pure."""
