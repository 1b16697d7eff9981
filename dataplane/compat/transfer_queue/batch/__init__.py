"""What callers hold: batches by key and by index, and what is said of them."""
