"""Production: which prompts are given to which worker, and what a window of it adds up to."""
