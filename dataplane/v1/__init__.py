"""The outside protocol's messages and stubs, generated from `proto/dataplane/v1/dataplane.proto`.

Not edited by hand: `make proto` writes them, and a test compares them with the file.
"""
