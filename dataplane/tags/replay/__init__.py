"""From a journal's records back to what the tag store was when they were written. Pure."""
