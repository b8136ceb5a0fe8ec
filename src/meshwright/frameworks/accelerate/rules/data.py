"""Rules on the data of TRL's own script for fine-tuning."""

from __future__ import annotations

from meshwright.frameworks import trl_data
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.frameworks.trainer_fields import EVALUATIONS, OFF
from meshwright.frameworks.types import SourcedValue


def _argument(ctx: RuleContext, name: str) -> SourcedValue | None:
    """Return an argument of TRL's script that is known here."""
    words = [str(one.value) for one in ctx.parsed.program.argv]
    given = ctx.parsed.program.given.get(name)
    return given if given is not None and not given.unresolved and trl_data.is_trl_script(words) else None


def _dataset_file(ctx: RuleContext) -> Problem | None:
    given = _argument(ctx, trl_data.DATASET)
    if given is None or trl_data.MIXTURE in ctx.parsed.program.given or not trl_data.is_file(str(given.value)):
        return None  # TRL reads the datasets of a --config file in its place
    message = (
        f"--{trl_data.DATASET} {given.value} is a file: TRL passes it to load_dataset, which takes a folder or a name "
        "of the hub; export writes a --config that names the file"
    )
    return Problem(message, (_export(ctx),), trl_data.DATASET)


def _export(ctx: RuleContext, *overrides: str) -> str:
    """Return the command that writes a --config file with the data."""
    gpus = "" if ctx.cluster is None else f" --gpus {ctx.cluster}"
    file = ctx.parsed.files[0] if ctx.parsed.files else "FILE"
    return " ".join((f"meshwright export {file}{gpus} --to accelerate --out FOLDER", *overrides))


def _no_test_split(ctx: RuleContext) -> Problem | None:
    name = next((one for one in EVALUATIONS if one in ctx.parsed.program.given), "")
    given, data = _argument(ctx, name), _argument(ctx, trl_data.DATASET)
    if given is None or data is None or str(given.value).lower() in OFF or not trl_data.is_file(str(data.value)):
        return None
    if trl_data.MIXTURE in ctx.parsed.program.given:  # a check of TRL's script, see start_checks
        return None
    message = (
        f"--{name} {given.value} needs a test split, and {data.value} is one file; export writes a --config that "
        f"holds out a part of it, and --{name} no trains without validation"
    )
    return Problem(message, (_export(ctx, f"data.validation_part={trl_data.held_out(ctx.recipe)}"),), name)


RULES = (
    FrameworkRule(
        "accelerate.trl-dataset-file",
        "warning",
        (trl_data.DATASET,),
        _dataset_file,
        symptom="FileNotFoundError: Couldn't find any data file",
        cause="load_dataset reads a file only as data_files of a builder such as json",
    ),
    FrameworkRule(
        "accelerate.trl-no-test-split",
        "warning",
        EVALUATIONS,
        _no_test_split,
        symptom="KeyError: 'test'",
        cause="TRL evaluates on the split that --dataset_test_split names",
    ),
)
