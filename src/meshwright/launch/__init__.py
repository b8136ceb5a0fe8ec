"""Commands and job scripts that start a plan."""

from meshwright.launch.commands import commands

__all__ = ["commands"]
