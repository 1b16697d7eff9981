"""Where groups run: this process, a child process, a Ray actor, behind one Protocol."""
