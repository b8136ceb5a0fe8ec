"""Properties of parameter counts of every model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.each import each

from meshwright.models import Attention, GatedDelta, Mamba2, ModelSpec, MoE, all_specs, find, names, spec_from_config

from . import small

SPECS = each("spec", all_specs())


@SPECS
def test_total_is_the_sum_of_its_parts(spec: ModelSpec) -> None:
    counts = spec.params
    layers = sum(layer.params(spec.hidden) for layer in spec.layers)
    outside = counts.embedding + counts.head + counts.vision + spec.final_norm_params + spec.extra_params
    assert counts.total == layers + outside
    assert layers == sum(layer.dense_params(spec.hidden) + layer.routed_params(spec.hidden) for layer in spec.layers)


@SPECS
def test_active_is_total_without_inactive_experts(spec: ModelSpec) -> None:
    idle = 0
    for layer in spec.layers:
        if isinstance(layer.ffn, MoE):
            idle += (layer.ffn.experts - layer.ffn.topk) * layer.ffn.expert_params(spec.hidden)
    assert spec.params.active == spec.params.total - idle
    assert 0 < spec.params.active <= spec.params.total
    assert (idle == 0) == (spec.moe is None)


@SPECS
def test_groups_place_every_layer_once(spec: ModelSpec) -> None:
    places = sorted(place for group in spec.groups for place in group.places)
    assert places == list(range(spec.num_layers))
    assert len({group.layer for group in spec.groups}) == len(spec.groups)
    assert all(spec.layers[place] is group.layer for group in spec.groups for place in group.places)


@SPECS
def test_every_shipped_model_names_its_source(spec: ModelSpec) -> None:
    assert spec.source
    assert spec.family
    assert spec.hf_class
    assert (spec.kind == "diffusion") == (spec.vocab == 0)
    assert (spec.kind == "vision_language") == (spec.vision is not None)
    assert spec.kind == "diffusion" or spec.max_seq_length >= 512


@SPECS
def test_mtp_modules_are_counted_separately(spec: ModelSpec) -> None:
    assert (spec.params.mtp > 0) == (spec.mtp_layers > 0)
    assert replace(spec, mtp_layers=0, mtp_layer=None).params.total == spec.params.total


def test_mixers_of_a_hybrid_are_found_by_type() -> None:
    spec = find("nemotronh_8b")
    assert [count for _, count in spec.mixers(Mamba2)] == [24]
    assert [count for _, count in spec.mixers(Attention)] == [4]
    assert spec.mixers(GatedDelta) == []


def test_models_named_after_their_expert_numbers_have_them() -> None:
    assert (find("qwen3_30b_a3b").moe or MoE(0, 0, 0)).experts == 128
    assert (find("kimi_k2").moe or MoE(0, 0, 0)).experts == 384
    assert find("llama3_8b").moe is None


@pytest.mark.parametrize("kind", small.STANDALONE)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_one_more_layer_adds_exactly_its_parameters(kind: str, data: st.DataObject) -> None:
    config = data.draw(small.decoder(kind))
    config["first_k_dense_replace"] = 0
    if "first_k_dense_replace" not in small.TRAITS[kind].defaults:
        del config["first_k_dense_replace"]
    spec = spec_from_config(config, "x")
    more = spec_from_config({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}, "x")
    assert more.layers[: spec.num_layers] == spec.layers
    assert more.params.total - spec.params.total == more.layers[-1].params(more.hidden)


def test_specs_are_values() -> None:
    assert find("llama3_8b") is find("llama3-8b")
    assert len(set(all_specs())) == len(names())
