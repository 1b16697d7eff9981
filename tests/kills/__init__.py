"""Processes of real planes killed at every named point, and at random: `make faults`."""
