"""What callers ask of rows: put, get, list and clear by key, and the same by index."""
