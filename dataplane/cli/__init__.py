"""The `dataplane` command."""
