"""Training ranks: processes that fetch their part of a batch, train it, and hand weights over."""
