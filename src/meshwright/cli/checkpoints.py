"""The commands around a training: make data ready, and try, measure and convert what was trained.

Options have the names of the verbs' arguments, so that a command hands them on as they are.
"""

from __future__ import annotations

from typing import Any

import click

from meshwright import api
from meshwright.cli.options import as_json, emit, examples, options, overrides

CHECKPOINT = "CHECKPOINT is a run's folder, one checkpoint of it, a Hugging Face folder, or adapters in PEFT's format."


@click.command(
    epilog=examples(
        "meshwright tokenize corpus.jsonl --tokenizer ./Llama-3-8B --out tokens",
        "meshwright tokenize books/*.txt --tokenizer bytes --out tokens --workers 2",
        "meshwright train llama3_8b_pretrain_config --dataset tokens --nproc 8",
    )
)
@click.argument("inputs", nargs=-1, required=True, metavar="FILE...")
@options(
    click.option("--tokenizer", required=True, metavar="DIR", help="Tokenizer folder, a cached id, or bytes."),
    click.option("--out", required=True, metavar="DIR", help="Where the shards go."),
    click.option("--column", default="text", show_default=True, help="Which column of JSONL or Parquet is the text."),
    click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Processes; all cores by default."),
    click.option("--shard-tokens", type=click.IntRange(min=1), metavar="N", help="Tokens in one shard."),
    click.option("--skip-bad-lines", is_flag=True, help="Leave out lines that cannot be read, and count them."),
    click.option(
        "--format",
        "format",
        type=click.Choice(["shards", "megatron"]),
        default="shards",
        show_default=True,
        help="Our shards, or Megatron's .bin/.idx.",
    ),
    as_json,
)
def tokenize(as_json: bool, **asked: Any) -> None:
    """Turns text, JSONL or Parquet files into tokens that training reads straight from disk."""
    _tell(api.tokenize(**asked), as_json, "tokenized")


@click.command(
    epilog=examples(
        'meshwright generate runs/my-run "The capital of France is"',
        'meshwright generate ./exported "Write a haiku" --temperature 0.8 --max-tokens 100',
    ),
    help=f"Lets a trained model go on from PROMPT.\n\n{CHECKPOINT}",
)
@click.argument("checkpoint")
@click.argument("prompt")
@options(
    click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True, metavar="N"),
    click.option(
        "--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0: the likeliest token."
    ),
    click.option("--top-p", type=click.FloatRange(min=0, max=1, min_open=True), default=1.0, show_default=True),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option("--chat/--raw", default=None, help="The prompt as a user's turn, or as plain text."),
    as_json,
)
def generate(as_json: bool, **asked: Any) -> None:
    _tell(api.generate(**asked), as_json, "generated")


@click.command(
    epilog=examples(
        "meshwright evaluate runs/my-run",
        "meshwright evaluate ./Llama-3-8B --dataset tokens --nproc 8 data.seq_length=8192",
    ),
    help=f"The perplexity of a trained model on a data set.\n\n{CHECKPOINT}",
)
@click.argument("checkpoint")
@overrides
@options(
    click.option("--dataset", metavar="DATA", help="Data set; a run's held-out samples by default."),
    click.option(
        "--answers", "answers_only", is_flag=True, help="Count only the answers of conversations (for a model folder)."
    ),
    click.option(
        "--samples",
        type=click.IntRange(min=1),
        default=256,
        show_default=True,
        metavar="N",
        help="Samples, in whole steps of 8 for each rank.",
    ),
    click.option("--nproc", type=click.IntRange(min=1), metavar="N", help="Ranks on this machine."),
    as_json,
)
def evaluate(as_json: bool, **asked: Any) -> None:
    _tell(api.evaluate(**asked), as_json, "evaluated")


@click.command(
    epilog=examples(
        "meshwright convert runs/my-run exported",
        "meshwright convert runs/my-lora-run merged --merge",
        "meshwright convert ./Llama-3-8B small-files --shard-gib 1 --dtype bf16",
    ),
    help=f"Writes a Hugging Face folder with the model of CHECKPOINT.\n\n{CHECKPOINT} Of a run with adapters the "
    "adapters are written in PEFT's format, or with --merge the model they were merged into.",
)
@click.argument("checkpoint")
@click.argument("out")
@options(
    click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="Format; that of the source by default."),
    click.option("--shard-gib", type=click.FloatRange(min=0, min_open=True), default=5.0, show_default=True),
    click.option("--consolidated", is_flag=True, help="One file."),
    click.option("--merge", is_flag=True, help="Merge adapters into the model."),
    as_json,
)
def convert(as_json: bool, **asked: Any) -> None:
    _tell(api.convert(**asked), as_json, "converted")


def _tell(answer: dict[str, object], as_json: bool, kind: str) -> None:
    if as_json:
        emit(answer)
    else:
        from meshwright.cli import render

        getattr(render, kind)(answer)
