"""Environments as TRL has them, as loops: one object per session, whose methods are the tools."""
