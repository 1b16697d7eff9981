"""Groups: the sessions of one prompt under one attempt, in the process that runs them."""
