"""A lower bound on the iteration time of every plan."""
