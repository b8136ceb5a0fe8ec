"""Checking one case and many."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright import api
from meshwright.recipes.case import Case
from meshwright.recipes.types import Engine
from meshwright.rules import RULES, check, legal, try_fixes

from .helpers import case, cluster


def plan(model: str, gpus: str, *overrides: str) -> api.Plan:
    """The plan of exactly this layout, with its findings."""
    return api.estimate(model, gpus=gpus, overrides=overrides)


def test_a_sound_case_has_no_errors() -> None:
    assert not [f for f in check(case()) if f.severity == "error"]


def test_columns_are_masked_like_single_cases() -> None:
    tp = np.array([1, 2, 3, 4, 8])
    assert legal(case().replace(tp=tp)).tolist() == [bool(legal(case().replace(tp=int(t)))) for t in tp]


def test_exceeding_host_memory_is_an_error() -> None:
    cut = ("layout.tp=8", "layout.pp=1", "layout.vp=1", "layout.cp=1", "layout.pp_schedule=1f1b")
    found = {f.rule: f for f in plan("llama31-405b", "8xH100", "layout.offload=params", *cut).findings}
    assert found["memory.host"].severity == "error"
    assert "256 GiB" in found["memory.host"].message
    small = {f.rule for f in plan("llama3-8b", "8xH100", "layout.offload=params").findings}
    assert "memory.host" not in small


@pytest.mark.parametrize("offload", ["none", "optimizer", "activations", "params"])
@pytest.mark.parametrize("engine", ["meshwright", "torchtitan", "deepspeed"])
def test_no_fix_offloads_more_than_host_memory(offload: str, engine: Engine) -> None:
    def memory(c: Case) -> dict[str, float]:
        offloaded = c.offload in ("optimizer", "params")
        return {"optimizer": 0.0 if offloaded else 3000.0, "host": 3000.0 if offloaded else 0.0}

    c = case(engine=engine, memory=memory, offload=offload)
    suggested = [override for finding in check(c) for override in finding.fix if "offload" in override]
    assert set(suggested) <= {"layout.offload=none", "layout.offload=activations"}


def test_a_small_state_may_be_offloaded() -> None:
    c = case(memory=lambda c: {"optimizer": np.where(c.offload == "optimizer", 0.0, 100.0)}, tp=8, sp=True)
    assert try_fixes(RULES["memory.state"], c) == ("layout.offload=optimizer",)


def test_the_estimate_replaces_the_rule_of_thumb() -> None:
    rule = RULES["memory.replicated-state"]
    assert bool(rule.broken(case(strategy="ddp")))
    assert not bool(rule.broken(case(strategy="ddp", memory=lambda c: {"optimizer": 100.0})))
    assert "memory.state" in {f.rule for f in check(case(strategy="ddp", memory=lambda c: {"optimizer": 100.0}))}


@pytest.mark.parametrize("engine", ["meshwright", "megatron"])
@pytest.mark.parametrize("name", ["qwen3_vl_8b_sft_config", "gemma3_vl_4b_sft_config", "glm_45v_peft_config"])
@pytest.mark.parametrize("dataset", ["squad", "mock", "cord-v2"])
def test_a_vision_language_model_gets_images_and_an_image_dataset(name: str, engine: str, dataset: str) -> None:
    start = ["data.images=false", f"data.dataset={dataset}"]
    before = api.check(name, engine=engine, overrides=start).findings
    fix = next(f.fix for f in before if f.rule == "data.no-images")
    assert "data.images=true" in fix
    assert dataset == "cord-v2" or "data.dataset=cord-v2" in fix
    fixed = {override.split("=")[0] for override in fix}
    repaired = [*fix, *(override for override in start if override.split("=")[0] not in fixed)]
    after = api.check(name, engine=engine, overrides=repaired).findings
    new = {f.rule for f in after if f.severity != "advice"}
    assert new <= {f.rule for f in before} - {"data.no-images"}


def test_a_vision_language_model_may_train_on_one_s_own_texts() -> None:
    words = ["data.images=false", "data.dataset=own_texts"]
    found = api.check("qwen3_vl_8b_sft_config", engine="meshwright", overrides=words).findings
    assert "data.no-images" not in {f.rule for f in found}


def test_too_few_tokens_name_the_useful_gpu_count() -> None:
    c = case(on=cluster(64), global_batch_size=64, seq_length=512)
    finding = next(f for f in check(c) if f.rule == "batch.too-few-tokens")
    assert "only 512 tokens" in finding.message
    assert "beyond 32 GPUs" in finding.message
    assert finding.fix == ("train.global_batch_size=128",)


def test_a_sharding_degree_of_zero_is_a_finding_not_a_crash() -> None:
    found = api.check("llama3_8b_pretrain_config", overrides=["layout.dp_shard=0"])
    assert [f.rule for f in found.findings if f.severity == "error"] == ["topology.shard-product"]


def test_a_fix_that_takes_memory_keeps_the_largest_micro_batch_that_fits() -> None:
    def memory(c: Case) -> dict[str, object]:
        return {"gradients": np.where(c.grads == "fp32", 30.0, 15.0), "activations": 12.0 * c.micro_batch_size}

    c = case(memory=memory, grads="bf16", reduce="bf16", micro_batch_size=4, global_batch_size=2048)
    fix = try_fixes(RULES["precision.bf16-accumulation"], c)
    assert fix == ("layout.micro_batch_size=2", "precision.grads=fp32", "precision.reduce=fp32")


def test_sums_in_fp32_that_do_not_fit_whole_are_reduced_every_micro_batch() -> None:
    cut = ("layout.ep=1", "layout.micro_batch_size=4", "layout.recompute=none")
    found = {f.rule: f for f in plan("olmoe_7b_pretrain_config", "8xA100-80", *cut).findings}
    fix = found["precision.bf16-accumulation"].fix
    assert fix == ("precision.grads=fp32", "precision.reduce=fp32", "layout.defer_grad_sync=false")
    fixed = plan("olmoe_7b_pretrain_config", "8xA100-80", *cut, *fix)
    assert "precision.bf16-accumulation" not in {f.rule for f in fixed.findings}
    assert fixed.estimate.step_s < 1.1 * plan("olmoe_7b_pretrain_config", "8xA100-80", *cut).estimate.step_s
