"""Module paths of TransferQueue's under which others look for names."""
