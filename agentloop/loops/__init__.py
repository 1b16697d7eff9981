"""Agent loops, the chat template that they speak through, and one session from prompt to reward."""
