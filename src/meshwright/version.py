"""The version of this package, and of the JSON that its commands print."""

from typing import Final

VERSION = "0.1.0"
SCHEMA: Final = "meshwright/2"
