"""Tensors and Python values to blocks, and back. Pure: no sockets, files or clocks."""
