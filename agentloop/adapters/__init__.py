"""Trajectories of other projects, taken in and given back. Imports none of those projects."""
