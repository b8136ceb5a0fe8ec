"""What `meshwright` alone prints: three things to try, and what to type after each."""

from __future__ import annotations

import click

from meshwright import __version__

TRY = (
    (
        "A plan for your model, GPUs and goal: layout, memory, speed and the command",
        "meshwright recommend llama3-8b --gpus 8xH100 --goal sft",
        "meshwright recommend llama3-8b --gpus 8xH100 --goal sft --explain",
    ),
    (
        "What fits on the GPU that you have",
        "meshwright models --gpus 1xRTX4090 --goal lora",
        "meshwright recommend qwen3-8b --gpus 1xRTX4090 --goal lora",
    ),
    (
        "What is wrong with a config or launch script (Megatron-LM, torchtitan, DeepSpeed, …), before it runs",
        "meshwright check llama3_70b_pretrain_config --gpus 16xA100-80",
        "meshwright check train.sh --gpus 8xH100",
    ),
)


def show() -> None:
    """Print the page."""
    click.echo(f"Meshwright {__version__}: plan, check, run and diagnose the training of large models. Try:\n")
    for number, (what, command, following) in enumerate(TRY, start=1):
        click.echo(f"{number}. {what}\n     {command}\n   then {following}\n")
    click.echo("meshwright recommend       asks for model, GPUs and goal")
    click.echo("meshwright --help          lists all commands")
    click.echo("meshwright completion      completes commands, models, GPUs and recipes in your shell")
