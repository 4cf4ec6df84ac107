"""Small programs the Makefile runs."""
