"""How files of NeMo AutoModel are detected, parsed, checked and written: loaded on first use."""

from __future__ import annotations

from meshwright.clusters import Cluster
from meshwright.frameworks.automodel.dataset_files import DATASET_RULES, readable
from meshwright.frameworks.automodel.derived_fields import is_benchmark
from meshwright.frameworks.automodel.extra_keys import is_extra_key, rejects_unknown
from meshwright.frameworks.automodel.format_override import format_setting
from meshwright.frameworks.automodel.ignored_keys import IGNORED_KEY_RULES
from meshwright.frameworks.automodel.mesh_rules import MESH_RULES
from meshwright.frameworks.automodel.model_rules import MODEL_RULES
from meshwright.frameworks.automodel.parse import detect, parse
from meshwright.frameworks.automodel.values import setting_value
from meshwright.frameworks.framework import Framework, ParsedConfig
from meshwright.recipes.key_maps.automodel_composite_keys import LOCAL_BATCH
from meshwright.recipes.key_maps.local_batch import with_passes
from meshwright.recipes.types import Recipe


def _complete(recipe: Recipe, parsed: ParsedConfig, on: Cluster) -> Recipe:
    import msgspec

    local = setting_value(parsed.settings, LOCAL_BATCH)
    if recipe.layout.pp > 1 and isinstance(local, int) and local > 0:
        recipe = with_passes(recipe, local, on.world)
    return msgspec.structs.replace(recipe, benchmark=True) if is_benchmark(parsed.settings) else recipe


FRAMEWORK: Framework = Framework(
    name="automodel",
    title="NeMo AutoModel",
    version="commit 36044ad, 2026-08-22",
    engine="automodel",
    inputs=(
        "YAML files",
        "the command `automodel FILE.yaml --nproc-per-node N --section.key value`",
        "the command `torchrun … nemo_automodel/recipes/llm/train_ft.py --config FILE.yaml --section.key value`",
    ),
    detect=detect,
    parse=lambda content: parse(content, FRAMEWORK),  # its rules on ignored keys run while parsing
    format_setting=format_setting,
    rules=(*IGNORED_KEY_RULES, *MESH_RULES, *MODEL_RULES, *DATASET_RULES),
    complete=_complete,
    rejects_unknown=rejects_unknown,
    is_extra_key=is_extra_key,
    readable_data=readable,
)
