"""`python -m teraio.cli`."""

from teraio.cli import main

main()
