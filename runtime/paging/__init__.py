"""Keeps the blocks on the device within the budget."""
