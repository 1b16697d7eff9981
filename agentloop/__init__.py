"""Agent loops: they run sessions against a model and publish trajectories to the data plane.

Uses only the public names of `dataplane`, and knows nothing of `trainer`.
"""
