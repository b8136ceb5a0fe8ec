"""`python -m meshwright` is the `meshwright` command."""

from meshwright.cli import main

main()
