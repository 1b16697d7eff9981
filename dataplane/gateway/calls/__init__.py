"""The calls of the protocol, one file for each group of them, and what they share."""
