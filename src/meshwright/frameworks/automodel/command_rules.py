"""Rules on the automodel command itself; a recipe's own script is exempt."""

from __future__ import annotations

from meshwright.frameworks.automodel.format_override import format_setting
from meshwright.frameworks.framework import FrameworkRule, Problem

NO_RECIPE = FrameworkRule(
    "automodel.no-recipe",
    "error",
    (),
    lambda ctx: (
        None
        if ctx.keys_under("recipe")
        else Problem(
            "the automodel command requires a recipe key in the file",
            (format_setting("recipe", "TrainFinetuneRecipeForNextTokenPrediction"),),
        )
    ),
    symptom="the command exits with a list of examples",
    cause="the recipe class is named in the file, not on the command line",
)


OLD_COMMAND = FrameworkRule(
    "automodel.old-command",
    "error",
    (),
    lambda ctx: Problem(
        "the first argument must be the config file, without finetune or llm", ("automodel FILE.yaml",)
    ),
    symptom="the command looks for a file named finetune",
    cause="guides still show the 2025 command",
)
