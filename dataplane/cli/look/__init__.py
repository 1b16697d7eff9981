"""Commands that look at a plane, and what they draw."""
