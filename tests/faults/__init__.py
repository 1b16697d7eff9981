"""Proofs with real processes: stopped, killed, forked, out of memory, and what is left after."""
