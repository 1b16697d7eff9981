"""Snapshots: all that the records of a journal have made, at one moment, and back. Pure."""
