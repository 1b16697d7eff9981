"""Child processes and what is said to them: msgpack over one socket, gone when the owner is."""
