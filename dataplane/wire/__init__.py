"""What travels between processes: frames, proofs of the plane's secret, columns of tags."""
