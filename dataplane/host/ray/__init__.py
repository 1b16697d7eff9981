"""A plane that Ray hosts. Imported only where Ray is."""
