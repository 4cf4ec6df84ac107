"""Runs the stages of compiled graphs, paged or plain."""
