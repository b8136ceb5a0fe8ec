"""The command line as a user types it."""

from tests.cli.conftest import meshwright

__all__ = ["meshwright"]
