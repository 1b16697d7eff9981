"""Checkpoints: one moment of a plane as files that plain pyarrow reads, and back."""
