"""The command line."""

from teraio.cli.commands import main
