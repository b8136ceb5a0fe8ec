"""Commands and job scripts that start a plan."""

from meshwright.launch.commands import commands, left_out

__all__ = ["commands", "left_out"]
