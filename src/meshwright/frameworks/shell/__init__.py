"""Bash launch scripts, parsed and interpreted without executing anything."""

from __future__ import annotations

from meshwright.frameworks.shell.launcher import find_launches, with_options
from meshwright.frameworks.shell.script import read_script
from meshwright.frameworks.shell.values import Command, LaunchCommand, Script, Unresolved

__all__ = ["Command", "LaunchCommand", "Script", "Unresolved", "find_launches", "read_script", "with_options"]
