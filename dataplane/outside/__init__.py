"""A client with the verbs and containers of `dataplane.Client` that reaches its plane through a
gateway: what `connect(address="grpcs://host:port")` returns.

For agent loops and trainers outside a cluster that have torch; without it there is
`dataplane.producer`.
"""
