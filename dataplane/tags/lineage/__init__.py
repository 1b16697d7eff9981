"""What happened to rows lately: a bounded ring of requests, and how one group's are found in it."""
