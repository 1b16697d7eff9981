"""The controller: indexes, claims and statuses, and how it is asked."""
