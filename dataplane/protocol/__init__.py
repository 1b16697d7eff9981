"""The outside protocol in Python: values, rows and errors as messages, and back. No sockets.

Needs numpy and protobuf only, so that producers outside a cluster use the same code as the gateway.
"""
