"""Commands that take, put, clear, save and restore."""
