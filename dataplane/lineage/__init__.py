"""The life of a group as rows: put together from what the tag store remembers, judged, exported."""
