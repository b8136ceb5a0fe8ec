"""The command that makes a shell complete commands, models, recipes, GPUs and goals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import click
from click.shell_completion import get_completion_class

from meshwright.cli.command import examples
from meshwright.errors import InputError, OutputError

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_MESHWRIGHT_COMPLETE"
MARK = "# meshwright completion"
COMPDEF = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n"
"""zsh defines compdef, which the script calls, only after compinit."""


class Place(NamedTuple):
    """Where the script of a shell is written, and the file that sources it; none if the shell finds it itself."""

    script: Path
    startup: Path | None


def place_of(shell: str) -> Place:
    """Return the files of a shell for this user."""
    home = Path.home()
    if shell == "fish":
        config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        return Place(config / "fish" / "completions" / "meshwright.fish", None)
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    startup = Path(os.environ.get("ZDOTDIR") or home) / ".zshrc" if shell == "zsh" else home / ".bashrc"
    return Place(data / "meshwright" / f"completion.{shell}", startup)


def script_of(shell: str) -> str:
    """Return the script that defines the completion of a shell."""
    from meshwright.cli.app import app

    found = get_completion_class(shell)
    if found is None:  # click has all three
        raise InputError(f"one of {', '.join(SHELLS)}", "shell", shell)
    return (COMPDEF if shell == "zsh" else "") + found(app, {}, "meshwright", VARIABLE).source()


def install(shell: str) -> list[str]:
    """Write the script and source it once at the start of the shell; return what was done."""
    script, startup = place_of(shell)
    done = []
    try:
        text = script_of(shell)
        if not script.is_file() or script.read_text(encoding="utf-8") != text:
            script.parent.mkdir(parents=True, exist_ok=True)
            script.write_text(text, encoding="utf-8")
            done.append(f"wrote {script}")
        if startup is not None:
            before = startup.read_text(encoding="utf-8") if startup.is_file() else ""
            if MARK not in before:
                gap = "" if not before or before.endswith("\n") else "\n"
                startup.write_text(f'{before}{gap}[ -f "{script}" ] && . "{script}"  {MARK}\n', encoding="utf-8")
                done.append(f"added a line to {startup}")
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", "completion", str(error.filename)) from error
    return done


def _users_shell() -> str:
    """Return the shell that the user runs."""
    name = Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        fix = tuple(f"meshwright completion {one} --install" for one in SHELLS)
        raise InputError(f"unknown shell; name one of {', '.join(SHELLS)}", "shell", name or None, fix)
    return name


@click.command(
    epilog=examples(
        "meshwright completion --install",
        "meshwright completion zsh --install",
        'eval "$(meshwright completion bash)"',
        "meshwright completion fish | source",
    )
)
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@click.option("--install", "wanted", is_flag=True, help="Write it to the files of your shell; once is enough.")
def completion(shell: str | None, wanted: bool) -> None:
    """Complete commands, models, recipes, GPUs and goals in your shell.

    --install sets it up for the shell you use; a shell's name alone prints the script.
    """
    if shell is not None and not wanted:
        click.echo(script_of(shell))
        return
    name = shell or _users_shell()
    if not wanted:
        click.echo(f"meshwright completion --install     sets it up for {name}")
        click.echo(f"meshwright completion {name:<14}prints the script")
        return
    done = install(name)
    click.echo("\n".join(done) if done else f"completion of {name} is installed already")
    click.echo(f"Start a new {name}, then try: meshwright recommend lla<Tab>")
