"""The version of teraio."""

__version__ = "0.1.0"
