"""One page about a plane and the run on it: what happened, as pictures, in a single HTML file."""
