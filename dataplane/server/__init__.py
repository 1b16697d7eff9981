"""Thin shells that put the two stores behind sockets."""
