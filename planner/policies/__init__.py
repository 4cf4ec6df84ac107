"""The ways of making a plan: the integer program and what it is compared with."""
