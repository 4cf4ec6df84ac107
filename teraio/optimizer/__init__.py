"""The optimizer step under the budget."""
