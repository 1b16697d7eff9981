"""The colocated loop: produce, plan, train, hand weights over, clear; one step after the other.

colocated.py    a run from its settings to its summary
step.py         one step, stage after stage
warm_up.py      supervised stages before the first step
parts.py        what the stages work with
decisions.py    which stage follows (pure)
"""
