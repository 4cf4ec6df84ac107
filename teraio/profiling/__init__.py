"""What an iteration did and when: the way to a trace."""
