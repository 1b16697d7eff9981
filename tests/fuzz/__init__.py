"""Coverage-guided fuzzing of everything that decodes what a stranger, a disk or a peer may say."""
