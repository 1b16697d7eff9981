"""Commands that run a plane and say who may call it."""
