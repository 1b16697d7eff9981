"""Values in files: npz, safetensors, Parquet, Arrow, JSON."""
