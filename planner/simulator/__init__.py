"""Replays a plan on its trace, independent of how the plan was made."""
