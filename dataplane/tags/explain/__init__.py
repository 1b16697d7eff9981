"""Why something waits, counted and put into words. Pure; `explain.py` is the way in."""
