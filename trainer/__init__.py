"""Trainer clients: select, plan, materialize and train on what agent loops published.

Uses only the public names of `dataplane`, and knows nothing of `agentloop`.
"""
