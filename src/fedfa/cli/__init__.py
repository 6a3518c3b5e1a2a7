"""The command line: thin, every command is one call. The only place that prints."""

from fedfa.cli.app import main

__all__ = ["main"]
