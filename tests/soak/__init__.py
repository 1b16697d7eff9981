"""A plane under load for long, after which nothing may have grown: `python -m tests.soak`."""
