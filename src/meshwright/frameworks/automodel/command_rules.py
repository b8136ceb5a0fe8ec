"""What is wrong with the automodel command itself; a recipe's own script needs none of it."""

from __future__ import annotations

from meshwright.frameworks.automodel.format_override import spell
from meshwright.frameworks.framework import FrameworkRule, Problem

NO_RECIPE = FrameworkRule(
    "automodel.no-recipe",
    "error",
    (),
    lambda ctx: (
        None
        if ctx.keys_under("recipe")
        else Problem(
            "the automodel command asks for a recipe in the file",
            (spell("recipe", "TrainFinetuneRecipeForNextTokenPrediction"),),
        )
    ),
    symptom="the command ends with a list of examples",
    cause="the class that trains is named in the file, not on the command line",
)


OLD_COMMAND = FrameworkRule(
    "automodel.old-command",
    "error",
    (),
    lambda ctx: Problem("the command takes the file first, without finetune or llm", ("automodel FILE.yaml",)),
    symptom="the command looks for a file of the name finetune",
    cause="guides still show the command of 2025",
)
