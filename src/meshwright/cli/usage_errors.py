"""Command lines that cannot be parsed: unknown commands and options, with did-you-mean and the command's help."""

from __future__ import annotations

from collections.abc import Sequence

import click

from meshwright.errors import InputError, closest


def unknown_command(name: str, known: list[str]) -> InputError:
    """Return the error for a command that does not exist."""
    near = closest(name, known)
    hint = f"did you mean {' or '.join(near)}?" if near else "meshwright --help lists the commands"
    return InputError(f"unknown command; {hint}", field="command", value=name, fix=near or ["meshwright --help"])


def to_error(error: click.ClickException, arguments: Sequence[str]) -> InputError:
    """Return click's error as ours: the option, why it is refused, and the option that was meant or the help."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "meshwright"
    if isinstance(error, click.NoSuchOption):
        options = [name for one in context.command.params for name in one.opts] if context else []
        typed = next((word for word in arguments if word.startswith(error.option_name)), error.option_name)
        typed = typed.partition("=")[0]  # click splits -to into -t and -o
        near = closest(typed, [name for name in options if name.startswith("--")])
        hint = f"did you mean {' or '.join(near)}?" if near else f"{command} --help lists its options"
        reason = f"{command} has no such option; {hint}"
        return InputError(reason, field="option", value=typed, fix=near or [f"{command} --help"])
    return InputError(error.format_message(), fix=[f"{command} --help"])
