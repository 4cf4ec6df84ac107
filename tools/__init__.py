"""Small programs that the Makefile runs."""
