"""The benchmark: this project and its peers, turn by turn in one run (`make bench`)."""
