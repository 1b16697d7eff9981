"""A node's values: extents and blocks (pure bookkeeping) and the segment files they lie in."""
