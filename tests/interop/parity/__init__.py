"""TransferQueue and the drop-in, value by value: the same cases run in one process against each.

`cases` is the register, a file per category fills it, `describe` turns what came back into plain
JSON, `side` runs all cases in one process, `compare` says what is unlike, and `differences` is the
one table of what may be. `python -m tests.interop.parity` prints that table as it was found.
"""
