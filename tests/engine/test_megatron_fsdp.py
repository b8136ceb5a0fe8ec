"""Megatron-FSDP without the package and without a GPU: errors, and that it initializes a stage as FSDP2 does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.engine.families import FAMILIES
from tests.engine.parity import recipe
from tests.engine.ranks import run

from meshwright.engine.mesh import build_mesh
from meshwright.engine.model.build import build_model, transformers_config
from meshwright.engine.model.init import record_initial
from meshwright.engine.model.stage import Stage
from meshwright.engine.parallelize import apply_tp, megatron, normalize_modules, parallelize, sequence_layout
from meshwright.engine.parallelize.init_weights import init_weights
from meshwright.engine.parallelize.pipeline import split_stages
from meshwright.errors import InputError
from meshwright.recipes import types


def test_without_a_gpu_it_is_an_error() -> None:
    with pytest.raises(InputError, match="needs NVIDIA GPUs") as refused:
        megatron.require(torch.device("cpu"))
    assert refused.value.field == "layout.strategy"
    assert "layout.strategy=fsdp2" in refused.value.fix


def test_without_the_package_the_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="not installed") as refused:
        megatron.require(torch.device("cuda"))
    assert refused.value.fix[0].endswith('pip install "meshwright[megatron_fsdp]"')


def test_with_both_it_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "find_spec", lambda name: object())
    megatron.require(torch.device("cuda"))


def _start_on_cpu(rank: int, world: int) -> str:
    given = recipe(types.Layout(strategy="megatron_fsdp"))
    try:
        parallelize(transformers_config(FAMILIES["llama"]), given, build_mesh(given.layout, "cpu"), torch.device("cpu"))
    except InputError as error:
        return str(error)
    return ""


def test_the_engine_raises_before_it_builds() -> None:
    assert "needs NVIDIA GPUs" in run(1, _start_on_cpu)[0]


def _stage(family: str, given: types.Recipe) -> tuple[Stage, dict[str, Any]]:
    config = transformers_config(FAMILIES[family])
    mesh = build_mesh(given.layout, "cpu")
    whole = [build_model(config, torch.float32)]
    initial = record_initial(whole[0], given.train.seed)
    stage = split_stages(whole, given.layout, config.num_hidden_layers, mesh.pp)[0]
    normalize_modules(stage, given, mesh.device_type)
    apply_tp(stage, mesh, given, *sequence_layout(given, mesh))
    return stage, initial


def _fill_both_ways(rank: int, world: int, family: str, compute: str) -> dict[str, Any]:
    """Return parameters that the two strategies initialize differently, and whether tied weights are still tied."""
    given = recipe(types.Layout(tp=world), precision=types.Precision(compute=compute))  # type: ignore[arg-type]
    ours, initial = _stage(family, given)
    init_weights(ours, initial, given.train.seed, torch.device("cpu"), offloaded=False)
    theirs, _ = _stage(family, given)
    modules = megatron.add_reset_parameters(theirs, given, initial)
    modes = {name: getattr(p, "_tensor_parallel_mode", "") for name, p in theirs.named_parameters()}
    for module in modules:
        # What Megatron-FSDP does to a module whose parameters have no data yet.
        if any(p.is_meta for p in module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()
    expected = {name: p.detach() for name, p in ours.named_parameters()}
    different = []
    for name, parameter in theirs.named_parameters():
        value = expected.pop(name)
        value = value.to_local() if hasattr(value, "to_local") else value
        kept: Any = parameter
        master = kept.get_high_precision_init_val() if compute == "bf16" else parameter.detach()
        if not torch.equal(master, value) or not torch.equal(parameter.detach(), value.to(parameter.dtype)):
            different.append(name)
    tied = theirs.lm_head.weight is theirs.embedding.weight
    return {"different": different, "missing": list(expected), "tied": tied, "modes": modes}


@pytest.mark.parametrize(
    ("family", "world", "compute"), [("llama", 2, "fp32"), ("qwen3", 1, "bf16"), ("qwen3", 2, "bf16")]
)
def test_a_stage_gets_the_same_initial_weights(family: str, world: int, compute: str) -> None:
    for found in run(world, _fill_both_ways, family, compute):
        assert found["different"] == []
        assert found["missing"] == []
        assert found["tied"] is bool(FAMILIES[family]["tie_word_embeddings"])
        if world > 1:
            assert found["modes"]["model.layers.0.self_attn.q_proj.weight"] == "column"
            assert found["modes"]["model.layers.0.mlp.down_proj.weight"] == "row"
            assert found["modes"]["model.norm.weight"] == ""
