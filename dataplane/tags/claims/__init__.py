"""What tasks may claim, who holds what, and how claims end. Pure; `claims.py` is the way in."""
