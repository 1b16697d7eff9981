"""Prints the folder that has `transfer_queue` in it: `export PYTHONPATH=$(python -m …)`."""

from dataplane.compat import folder

print(folder())
