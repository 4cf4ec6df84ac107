"""The integer program that decides what moves, where to, and when."""
