"""The main command: groups of commands, each built when it is used."""

from __future__ import annotations

import gc
from importlib import import_module

import click

from meshwright import __version__
from meshwright.api.verbs import GROUPS, VERBS, verbs_on
from meshwright.cli.command import build, examples

SERVE = {
    "web": "Serve the web UI and the HTTP API.",
    "mcp": "Serve the verbs as tools for coding agents (MCP).",
    "completion": "Complete commands, models and GPUs in your shell.",
}


class Commands(click.Group):
    """Builds a command from its verb when it is used, and lists commands in groups."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, group by group."""
        return [name for _, rows in command_groups() for name, _ in rows]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by name."""
        if cmd_name in VERBS and "cli" in VERBS[cmd_name].surfaces:
            return build(VERBS[cmd_name])
        if cmd_name not in SERVE:
            return None
        found: click.Command = getattr(import_module(f"meshwright.cli.{cmd_name}"), cmd_name)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command to run; raise InputError with did-you-mean for an unknown one."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            from meshwright.cli.usage_errors import unknown_command

            raise unknown_command(args[0], self.list_commands(ctx), args[1:])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in groups."""
        for group, rows in command_groups():
            with formatter.section(group):
                formatter.write_dl(rows)


def command_groups() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return groups of commands, each with its one-sentence help."""
    groups = [(group, [(v.name, v.summary) for v in verbs_on("cli") if v.group == group]) for group in GROUPS[:-1]]
    return [*groups, (GROUPS[-1], list(SERVE.items()))]


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog=examples(
        "meshwright recommend llama3-8b --gpus 8xH100 --goal sft",
        "meshwright check llama3_70b_pretrain_config --gpus 64xA100-80",
        "meshwright recipes llama --goal sft",
    ),
)
@click.version_option(__version__, message="meshwright %(version)s")
@click.pass_context
def app(context: click.Context) -> None:
    """Plan, check, dry-run, run and diagnose the training of large models.

    `meshwright recommend` without arguments asks for model, GPUs and goal on a terminal.

    Exit codes: 0 success, 1 the answer is no, 2 bad input, 3 a run failed, 75 stopped (checkpoint saved; restart to
    resume), 130 interrupted.
    """
    if context.invoked_subcommand in SERVE:
        gc.enable()  # servers run for long
    if context.invoked_subcommand is None:
        from meshwright.cli.start_page import show

        show()
