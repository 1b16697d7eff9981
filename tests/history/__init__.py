"""Recorded histories of concurrent clients, and the checker that decides whether they are legal."""
