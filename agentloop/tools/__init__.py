"""Tools that a policy may call: what one is, how calls are read, and functions as tools."""
