"""The tag store: keys, tags, placements and revisions. It never holds a value."""
