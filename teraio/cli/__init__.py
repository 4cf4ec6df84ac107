"""The command line."""

from teraio.cli.commands import main

__all__ = ["main"]
