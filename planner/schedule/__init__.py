"""From decisions to exact moves: when each copy begins."""
