"""verl's V1 trainers, end to end, on this plane: `python -m tests.interop.verl`.

All that speaks to the store is verl's own: its trainers' `fit`, replay buffers, agent-loop worker
and manager, padding, balance, dispatch and bridge, advantages, checkpoints. What needs a model or a
GPU is played: what the sessions say (`script`), what the ranks compute (`ranks`).
"""
