"""The command line as a newcomer types it."""

from tests.cli.conftest import meshwright

__all__ = ["meshwright"]
