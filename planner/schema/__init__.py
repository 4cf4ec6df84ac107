"""The two files, traces and plans: what is in them, and how they are read and written."""
