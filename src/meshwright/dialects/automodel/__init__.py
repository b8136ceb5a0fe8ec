"""NeMo AutoModel: YAML files, and the commands that start one with settings on top."""

from __future__ import annotations

from meshwright.clusters import Cluster
from meshwright.dialects.automodel.dropped import BEFORE
from meshwright.dialects.automodel.follows import is_benchmark
from meshwright.dialects.automodel.known import is_closed, is_known
from meshwright.dialects.automodel.mesh_rules import MESH
from meshwright.dialects.automodel.model_rules import MODEL
from meshwright.dialects.automodel.parse import parse, recognises
from meshwright.dialects.automodel.spelling import spell
from meshwright.dialects.dialect import Dialect, Parsed
from meshwright.recipes.types import Recipe


def _complete(recipe: Recipe, parsed: Parsed, on: Cluster) -> Recipe:
    import msgspec

    return msgspec.structs.replace(recipe, benchmark=True) if is_benchmark(parsed.settings) else recipe


DIALECT = Dialect(
    name="automodel",
    title="NeMo AutoModel",
    version="commit 36044ad, 2026-08-22",
    engine="automodel",
    forms=(
        "YAML files",
        "the command `automodel FILE.yaml --nproc-per-node N --section.key value`",
        "the command `torchrun … nemo_automodel/recipes/llm/train_ft.py --config FILE.yaml --section.key value`",
    ),
    recognises=recognises,
    parse=parse,
    spell=spell,
    rules=(*BEFORE, *MESH, *MODEL),
    complete=_complete,
    closed=is_closed,
    known=is_known,
)
