"""What processes of a plane say of themselves: one event a line, as text or as JSON."""
