"""Commands and job scripts that start a plan; their submission and watching (compose.py: from a question to a job)."""

from meshwright.launch.commands import command_of, commands, left_out

__all__ = ["command_of", "commands", "left_out"]
