"""One trajectory: how it grows, its canonical form, and the row that it is published as. No I/O."""
