"""Hugging Face Accelerate: FSDP, DeepSpeed and Megatron by one YAML file."""

from __future__ import annotations

from meshwright.clusters import Cluster
from meshwright.dialects.accelerate.keys import closed, known, spell
from meshwright.dialects.accelerate.parse import complete, parse, recognises
from meshwright.dialects.accelerate.rules import RULES
from meshwright.dialects.dialect import Dialect
from meshwright.dialects.types import Written
from meshwright.models import ModelSpec
from meshwright.recipes.types import Recipe


def _write(recipe: Recipe, model: ModelSpec, on: Cluster) -> Written:
    from meshwright.dialects.accelerate.write import write

    return write(DIALECT, recipe, model, on)


DIALECT = Dialect(
    name="accelerate",
    title="Accelerate",
    version="1.15.0",
    engine="fsdp1",
    forms=("YAML files of `accelerate config`", "the command `accelerate launch --config_file FILE.yaml … train.py …`"),
    recognises=recognises,
    parse=parse,
    spell=spell,
    rules=RULES,
    complete=complete,
    write=_write,
    closed=closed,
    known=known,
)
