"""From a captured graph to a program of stages."""
