"""Recompute frees the activations it names: bytes that a layer saves, measured and as estimated."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import msgspec
import pytest
import torch
from tests.engine.families import FAMILIES
from tests.engine.kept import kept_bytes
from tests.engine.parity import recipe
from tests.engine.ranks import run

from meshwright import clusters
from meshwright.costs.activations import activation_bytes_by_recompute as predicted_bytes
from meshwright.costs.activations import layer_activation_bytes
from meshwright.engine.data.mock import Mock
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model.build import transformers_config
from meshwright.engine.trainer import Trainer
from meshwright.models import spec_from_config
from meshwright.recipes import types
from meshwright.recipes.case import Case

SEQ, SAMPLES = 64, 2
WIDE = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_attention_heads": 8}
NOTHING = types.Layout(micro_batch_size=SAMPLES)
CASES = {  # module -> a family that has it
    "core_attn": "llama",
    "layernorm": "llama",
    "mlp": "llama",
    "ops": "llama",
    "moe": "deepseek_v3",
    "moe_act": "deepseek_v3",
    "mla_up_proj": "deepseek_v3",
    "shared_experts": "deepseek_v3",
}


def selective(*modules: str) -> types.Layout:
    return types.Layout(micro_batch_size=SAMPLES, recompute="selective", recompute_modules=modules)  # type: ignore[arg-type]


def wide(family: str, layers: int) -> dict[str, Any]:
    config = FAMILIES[family] | {name: value for name, value in WIDE.items() if name in FAMILIES[family]}
    if "kv_lora_rank" in config:
        config |= {"first_k_dense_replace": 0, "num_key_value_heads": config["num_attention_heads"]}
    return config | {"num_hidden_layers": layers}


def given(layout: types.Layout, attention: str) -> types.Recipe:
    kernels = types.Kernels(attention=attention)  # type: ignore[arg-type]
    return recipe(layout, data=types.Data(seq_length=SEQ), kernels=kernels)


def kept_by_layers(rank: int, world: int, family: str, layouts: list[types.Layout], attention: str) -> list[float]:
    """Return the fp32 values that a layer saves per token, for each layout."""

    def kept(layout: types.Layout, layers: int) -> int:
        config = transformers_config(wide(family, layers))
        mesh = build_mesh(layout, "cpu")
        source = Mock(config.vocab_size, SEQ, seed=1)
        trainer = Trainer(given(layout, attention), config, mesh, torch.device("cpu"), source)
        (stage,) = trainer.stages
        tokens, kwargs = trainer.loader.batch(0).micro_batches(SAMPLES)[0]
        return kept_bytes(stage, lambda: stage(tokens, **kwargs))

    return [(kept(layout, 3) - kept(layout, 1)) / 2 / (SEQ * SAMPLES) / 4 for layout in layouts]


def attention_for(module: str) -> str:
    return "eager" if module == "core_attn" else "auto"  # flash attention has no scores to drop


@cache
def kept_values(family: str, attention: str) -> dict[str, float]:
    """Return what a layer saves per token with each module recomputed, with none ("") and with all ("full")."""
    modules = [name for name, of in CASES.items() if (of, attention_for(name)) == (family, attention)]
    full = types.Layout(micro_batch_size=SAMPLES, recompute="full")
    layouts = [NOTHING, full, *map(selective, modules)]
    return dict(zip(["", "full", *modules], run(1, kept_by_layers, family, layouts, attention)[0], strict=True))


@pytest.mark.parametrize("module", CASES)
def test_a_recomputed_module_is_not_saved(module: str) -> None:
    values = kept_values(CASES[module], attention_for(module))
    every, some, least = values[""], values[module], values["full"]
    assert least < some < 0.97 * every
    assert least == pytest.approx(WIDE["hidden_size"], rel=0.01)  # the layer's input


def test_saved_operations_match_the_estimate() -> None:
    layout = selective("ops")
    (measured,) = run(1, kept_by_layers, "llama", [layout], "auto")[0]
    spec = spec_from_config(wide("llama", 1), "llama")
    case = Case(given(layout, "auto"), spec, clusters.cluster("1xH100"), "meshwright")
    _, priced, _ = predicted_bytes(case, layer_activation_bytes(case, spec.groups[0].layer))
    assert measured * 4 == pytest.approx(priced, rel=0.1)


def compiled_step(rank: int, world: int, layouts: list[types.Layout]) -> list[tuple[float, int, int]]:
    """Return the loss, the compiled graphs and the bytes saved of a MoE model for each layout, compiled without C++."""
    inner = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self, **settings: inner(self, **settings, backend="aot_eager")  # type: ignore[method-assign,assignment,misc]
    found = []
    for layout in layouts:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = msgspec.structs.replace(given(layout, "auto"), kernels=types.Kernels(compile=True))
        config = transformers_config(wide("deepseek_v3", 2))
        source = Mock(config.vocab_size, SEQ, seed=1)
        trainer = Trainer(compiled, config, build_mesh(layout, "cpu"), torch.device("cpu"), source)
        (stage,) = trainer.stages
        tokens, kwargs = trainer.loader.batch(0).micro_batches(SAMPLES)[0]
        saved = kept_bytes(stage, partial(stage, tokens, **kwargs))
        loss = trainer.step(0).loss
        found.append((loss, torch._dynamo.utils.counters["stats"]["unique_graphs"], saved))
    return found


def test_recomputed_moe_layers_are_compiled_as_others_are() -> None:
    """A checkpoint with a graph break inside would run without the compiler: 5 times a forward pass on an H200."""
    full = types.Layout(micro_batch_size=SAMPLES, recompute="full")
    (loss, graphs, saved), *recomputed = run(1, compiled_step, [NOTHING, full, selective("moe")], timeout=240)[0]
    for found, compiled, kept in recomputed:
        assert found == pytest.approx(loss, rel=1e-6)
        assert compiled >= graphs
        assert kept < saved
