"""Trajectories of others: what is checked of them, the rows they become, and quarantine."""
