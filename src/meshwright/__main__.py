"""`python -m meshwright` is the `meshwright` command."""

from meshwright.cli import main

if __name__ == "__main__":  # a process that this one starts reads this file under another name
    main()
