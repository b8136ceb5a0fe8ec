"""Launch scripts of bash, read without running anything."""

from __future__ import annotations

from meshwright.frameworks.shell.launcher import launched
from meshwright.frameworks.shell.script import read_script
from meshwright.frameworks.shell.values import Command, Launched, Script, Unresolved

__all__ = ["Command", "Launched", "Script", "Unresolved", "launched", "read_script"]
