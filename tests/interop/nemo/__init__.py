"""NeMo-RL's data plane on the drop-in: its call sequences, and its own tests from a checkout."""
