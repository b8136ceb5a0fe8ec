"""What the commands share: options, examples, JSON and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from meshwright import api
from meshwright.cli import complete

FAILED = 1  # the answer is no


def examples(*lines: str) -> str:
    """The examples that close a help page, one line each."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def emit(answer: dict[str, Any]) -> None:
    """Prints one JSON object."""
    click.echo(json.dumps(answer, indent=2, default=str))


def end(ok: bool) -> None:
    """Leaves with the exit code of the answer."""
    click.get_current_context().exit(0 if ok else FAILED)


as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
gpus_option = click.option(
    "--gpus",
    metavar="CLUSTER",
    help="8xH100, 4x8xH100 (nodes × GPUs), 72xGB200, a count, auto, or a TOML file.",
    shell_complete=complete.gpus,
)
required_gpus = click.option(
    "--gpus", required=True, metavar="CLUSTER", help="8xH100, 4x8xH100, 72xGB200, …", shell_complete=complete.gpus
)
seq_option = click.option(
    "--seq", metavar="TOKENS", help="Sequence length, e.g. 8192, 8k or 1M; the recipe's own by default."
)
goal_option = click.option("--goal", metavar="GOAL", help="pretrain, sft or peft.", shell_complete=complete.goals)
engine_option = click.option(
    "--engine",
    default="meshwright",
    show_default=True,
    metavar="ENGINE",
    help="What will run the plan: " + ", ".join(api.ENGINES) + ". It changes memory and speed.",
    shell_complete=complete.engines,
)


framework_option = click.option(
    "--framework",
    metavar="FRAMEWORK",
    help="Whose words a file is written in, when it does not show: " + ", ".join(("meshwright", *api.FRAMEWORKS)) + ".",
)
calibration_option = click.option(
    "--calibration", metavar="FILE", help="A profile of your own machine, as `meshwright calibrate` writes it."
)


plot_option = click.option("--plot", metavar="FILE", help="Also draw it, as .svg or .png (needs matplotlib).")


def options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several decorators as one, in reading order."""

    def decorate(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate
