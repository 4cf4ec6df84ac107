"""What the integer program and the lower bound share: rows, time segments, the model of updates on the host."""
