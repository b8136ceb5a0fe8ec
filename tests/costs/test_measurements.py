"""Rows of a measurement table become the cases they describe, or have a reason why not."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright import costs
from meshwright.costs import measurements
from meshwright.costs.measurements_knobs import network_gb_s
from meshwright.costs.measurements_models import UnknownModelError, model_of_row
from meshwright.errors import InputError
from meshwright.models import MLA, Attention, Dense, GatedDelta, Mamba2, MoE
from meshwright.recipes.capabilities import executed

ROW = {
    "source": "lab", "framework": "Megatron-LM", "framework_version": "2021-04", "model": "gpt_7.5b",
    "hf_id_or_dims": "L36 H4096 F16384 A32 V51200", "mode": "pretrain", "gpu": "A100-80", "interconnect": "",
    "gpus_per_node": "8", "n_gpus": "128", "seq_len": "2048", "mbs": "1", "gbs": "512", "precision": "fp16",
    "tp": "4", "pp": "1", "cp": "1", "dp_strategy": "ddp", "recompute": "full", "step_time_s": "3.7",
    "tokens_per_s_per_gpu": "", "status": "ok", "tier": "A", "mem_tier": "", "precision_class": "fp16",
    "recompute_class": "full", "dp_class": "ddp",
}  # fmt: skip


def table(folder: Path, *rows: dict[str, str]) -> Path:
    path = folder / "rows.csv"
    names = list(dict.fromkeys(name for row in rows for name in row)) or list(ROW)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_one(folder: Path, **changes: str) -> measurements.Measurement:
    return measurements.read(table(folder, {**ROW, **changes}))[0]


def names(row: measurements.Measurement, *wanted: str) -> tuple[Any, ...]:
    assert row.case is not None, row.unsupported
    return tuple(getattr(row.case, name) for name in wanted)


def test_an_old_megatron_row(tmp_path):
    row = read_one(tmp_path)
    fields = ("tp", "micro_batch_size", "global_batch_size", "recompute", "strategy", "speed_profile", "sp")
    assert names(row, *fields) == (4, 1, 512, "full", "ddp", "megatron_2021", False)
    assert names(row, "attention", "compute", "overlap_grad_reduce") == ("eager", "fp16", False)
    assert row.step_s == 3.7
    assert row.model is not None
    assert row.model.tied
    assert row.model.params.total == pytest.approx(7.5e9, rel=0.03)


def test_a_current_row_of_the_same_framework(tmp_path):
    row = read_one(tmp_path, framework_version="mcore 2025", precision="fp8-mx", precision_class="fp8-mx", gpu="GB200",
                   gpus_per_node="4", recompute="", recompute_class="unknown", dp_class="zero1")  # fmt: skip
    assert names(row, "speed_profile", "matmul", "recompute", "strategy", "sp", "nvlink_domain") == (
        "megatron", "mxfp8", "none", "zero1", True, 72,
    )  # fmt: skip


def test_time_follows_from_tokens_per_second(tmp_path):
    row = read_one(tmp_path, step_time_s="", tokens_per_s_per_gpu="1000")
    assert row.step_s == pytest.approx(512 * 2048 / 128 / 1000)


def test_time_follows_from_tflops_and_their_convention(tmp_path):
    stated = {"step_time_s": "", "tflops_per_gpu_model": "140", "seq_len": "16384"}
    texts = ("6N + causal attention", "mcore num_floating_point_operations", "12*L*h*s non-causal attention")
    rows = [read_one(tmp_path, **stated, flops_convention=text) for text in texts]
    assert {row.timed_by for row in rows} == {measurements.BY_TFLOPS}
    half, also, full = (row.step_s for row in rows)
    assert half == also < full
    case = rows[0].case
    flops = costs.flops_per_token(case) * 512 * 16384 / 128
    assert half == pytest.approx(flops / 140e12)
    assert read_one(tmp_path, **{**stated, "seq_len": "512"}).step_s > 0  # the conventions hardly differ


def test_lengths_follow_from_the_benchmark_or_the_tokens_of_a_step(tmp_path):
    golden = {"seq_len": "", "step_time_s": "2", "tokens_per_s_per_gpu": "400", "dp_replicate": "32"}
    assert names(read_one(tmp_path, **golden), "seq_length") == (200,)
    image = {"framework": "NeMo/Megatron-Core (MLPerf)", "model": "flux.1_schnell", "seq_len": "", "tp": "1"}
    row = read_one(tmp_path, **image, hf_id_or_dims="black-forest-labs/FLUX.1-schnell", gpu="B200", precision="bf16")
    assert names(row, "seq_length") == (512,)


def test_chunks_of_a_pipeline_follow_from_nemos_recipe(tmp_path):
    nemo = {
        "framework": "NeMo/Megatron-Core",
        "model": "nemotron4_340b",
        "hf_id_or_dims": "nvidia/Nemotron-4-340B-Base",
    }
    nemo |= {"tp": "8", "pp": "8", "n_gpus": "256", "gbs": "64", "mbs": "1", "vp": ""}
    assert names(read_one(tmp_path, **nemo), "vp") == (12,)
    assert names(read_one(tmp_path, **{**nemo, "vp": "6"}), "vp") == (6,)


def test_what_primus_leaves_open_is_in_its_examples(tmp_path):
    bare = {"framework": "Primus (Megatron)", "framework_version": "", "gpu": "MI300X", "n_gpus": "8", "seq_len": "",
            "mbs": "", "gbs": "", "tp": "1", "pp": "8", "vp": "2", "step_time_s": "", "tokens_per_s_per_gpu": "11347",
            "model": "llama2_7b", "hf_id_or_dims": "meta-llama/Llama-2-7b"}  # fmt: skip
    row = read_one(tmp_path, **bare, notes="pipeline schedule zbv; batch and sequence not stated")
    wanted = ("seq_length", "micro_batch_size", "global_batch_size", "pp_schedule")
    assert names(row, *wanted) == (4096, 4, 256, "zbv")


def test_a_pipeline_without_a_batch_has_eight_micro_batches_per_stage(tmp_path):
    row = read_one(tmp_path, pp="2", gbs="", step_time_s="", tokens_per_s_per_gpu="2000")
    assert names(row, "accumulation") == (16,)
    assert names(read_one(tmp_path, mbs="", gbs="", step_time_s="", tokens_per_s_per_gpu="9"), "micro_batch_size") == (
        8,
    )


def test_an_unknown_model_is_priced_by_its_size(tmp_path):
    row = read_one(tmp_path, hf_id_or_dims="nvidia/Llama-3_3-Nemotron-Super-49B-v1_5", model="super")
    assert row.model is not None
    assert row.model.params.total == pytest.approx(49e9, rel=0.02)
    linear = model_of_row("gdn_300m", "12 linear-attention + 12 MLP blocks, H1024 F4096", 0.0)
    assert linear.num_layers == 12
    assert isinstance(linear.groups[0].layer.mixer, GatedDelta)


def test_a_row_that_says_its_layout_is_the_best_gets_the_fastest_that_fits(tmp_path):
    open_row = {"tp": "", "pp": "", "framework_version": "2025", "gpu": "H100-SXM", "seq_len": "32768", "mbs": "",
                "recompute": "", "recompute_class": "unknown", "dp_class": "zero1"}  # fmt: skip
    row = read_one(tmp_path, **open_row, notes="best no-CP configuration; parallelism not stated")
    assert row.case is not None
    assert costs.memory(row.case).fits
    for other in ({"tp": "8", "pp": "4"}, {"tp": "4", "pp": "8"}):
        slower = read_one(tmp_path, **{**open_row, **other, "recompute_class": "none"})
        assert costs.step_time(row.case).step_s <= costs.step_time(slower.case).step_s


def test_knobs_are_read_where_a_row_states_them(tmp_path):
    hopper = {"framework_version": "2025", "gpu": "H100-SXM", "interconnect": "Grand Teton 8xH100"}
    assert names(read_one(tmp_path, **hopper), "gpu") == ("H100",)  # only Meta's development hosts run at 500 W
    assert names(read_one(tmp_path, **hopper, attn_impl="FA3"), "attention_kernel") == ("best",)
    assert names(read_one(tmp_path, **hopper, attn_impl="FA4"), "attention_kernel") == ("flash4",)
    old = {**hopper, "framework": "NeMo/Megatron-Core", "framework_version": "NeMo 24.03.01"}
    assert names(read_one(tmp_path, **old), "attention_kernel") == ("flash2",)
    overlapped = read_one(tmp_path, **{**hopper, "dp_strategy": "ddp; tp-comm-overlap"})
    assert names(overlapped, "tp_comm_overlap") == (True,)
    deep = {**hopper, "pp": "4", "framework_version": "2024"}
    assert names(read_one(tmp_path, **deep), "vp") == (1,)
    assert names(read_one(tmp_path, **{**deep, "model": "gpt_64", "hf_id_or_dims": "L64 H4096 A32 V51200"},
                          notes="interleaved PP schedule"), "vp", "pp_schedule") == (8, "interleaved_1f1b")  # fmt: skip
    moe = {**hopper, "framework_version": "dev 2026-03", "ep": "8", "hf_id_or_dims": "Qwen/Qwen3-235B-A22B"}
    assert names(read_one(tmp_path, **moe), "etp", "force_balance") == (1, True)
    assert names(read_one(tmp_path, **moe, notes="dropless"), "force_balance") == (False,)


def test_a_measured_run_is_estimated_as_it_ran(tmp_path):
    """The files of an engine may not be able to say what a run did: a chunked loss with the Trainer's DeepSpeed."""
    row = read_one(tmp_path, framework="DeepSpeed", framework_version="0.19", tp="1", dp_class="zero3_fsdp")
    assert executed(row.case).loss == "fused_linear"
    chunked = row.case.replace(loss="chunked")
    assert executed(chunked).loss == "chunked"
    assert executed(chunked.replace(as_run=())).loss == "vocab_parallel"


def test_blank_batches_follow_from_each_other(tmp_path):
    assert names(read_one(tmp_path, mbs="", grad_accum="4"), "micro_batch_size") == (4,)
    assert names(read_one(tmp_path, gbs="", mbs="2", grad_accum="3"), "global_batch_size") == (2 * 32 * 3,)
    assert names(read_one(tmp_path, mbs="", pp="4"), "micro_batch_size") == (1,)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_gpus": ""}, "number of GPUs"),
        ({"seq_len": ""}, "sequence length"),
        ({"framework": "MaxText (JAX)"}, "JAX"),
        ({"framework": "Unheard"}, "no profile"),
        ({"hf_id_or_dims": "who/knows", "model": "nobody"}, "not in the catalog"),
        ({"hf_id_or_dims": "who/knows-30B-A3B", "model": "nobody_moe"}, "not in the catalog"),
        ({"gpu": "Abacus"}, "unknown GPU"),
        ({"tp": "3"}, "does not divide"),
        ({"flag": "INCONSISTENT dp*mbs*ga=256 vs gbs=1024"}, "contradicts"),
        ({"flag": "last two rows print the same 7.30"}, "contradicts"),
        ({"tp": "", "pp": ""}, "parallelism"),
        ({"mode": "rl"}, "unknown mode"),
        ({"tokens_per_s_per_gpu": "1000"}, "contradicts itself: tokens/s and step time"),
        ({"dp_replicate": "16"}, "contradicts itself: GPUs and dp x tp x pp x cp"),
        ({"dp_shard": "16", "dp_replicate": "4"}, "contradicts itself: GPUs and dp x tp x pp x cp"),
        ({"step_time_s": "", "tflops_per_gpu_model": "140", "seq_len": "65536"}, "without their FLOPs convention"),
    ],
)
def test_unusable_rows_have_a_reason(tmp_path, changes, reason):
    row = read_one(tmp_path, **changes)
    assert row.case is None
    assert reason in row.unsupported


def test_missing_columns_and_empty_tables_are_errors(tmp_path):
    with pytest.raises(InputError, match="tp, pp"):
        measurements.read(table(tmp_path, {k: v for k, v in ROW.items() if k not in ("tp", "pp")}))
    with pytest.raises(InputError, match="no rows"):
        measurements.read(table(tmp_path))
    with pytest.raises(InputError, match="cannot be read"):
        measurements.read(tmp_path / "nowhere.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError):
        measurements.read(tmp_path / "binary.csv")


def test_batches_match_single_rows(tmp_path):
    layouts = [(tp, pp, mbs) for tp in "128" for pp in "14" for mbs in "12"]
    rows = measurements.read(table(tmp_path, *({**ROW, "tp": tp, "pp": pp, "mbs": mbs} for tp, pp, mbs in layouts)))
    found = list(measurements.batches(rows))
    assert len(found) == 1
    case, places = found[0]
    together = np.asarray(costs.step_time(case).step_s)
    for place, seconds in zip(places, together, strict=True):
        assert seconds == pytest.approx(costs.step_time(rows[place].case).step_s, rel=1e-9)


@pytest.mark.parametrize(
    ("text", "gb_s"),
    [
        ("Selene: 8xA100 NVSwitch, 8x200Gb/s HDR IB", 25.0),
        ("Jean Zay: 8xA100 NVLink, 4xOmniPath 100Gb/s per node", 6.25),
        ("Grand Teton: 8xH100 NVLink, 400Gb/s RDMA per GPU; 500W", 50.0),
        ("1600 Gbps RoCE node-node", 25.0),
        ("NVLink4, IB 8x50GB/s", 50.0),
        ("DGX H100", 0.0),
        ("", 0.0),
    ],
)
def test_networks_are_parsed(text, gb_s):
    assert network_gb_s(text, 8) == pytest.approx(gb_s)


def test_models_are_parsed_from_dimensions():
    llama = model_of_row("llama_7b", "L32 H4096 F11008 A32 KV8 V32000", 0.0)
    mixer, ffn = llama.groups[0].layer.mixer, llama.groups[0].layer.ffn
    assert mixer == Attention(32, 8, 128)
    assert ffn == Dense(11008, gated=True)
    assert not llama.tied
    moe = model_of_row("deepseek_like", "L4 H2048 F8192 A16 KV16 E32 top4 Fexp1024 MLA swiglu untied V1000", 0.0)
    assert isinstance(moe.groups[0].layer.mixer, MLA)
    assert isinstance(moe.groups[0].layer.ffn, MoE)
    hybrid = model_of_row("hybrid", "LNone H1024 F4096 A16 KV8 tied pattern=M-M*-|M-", 0.0)
    assert hybrid.num_layers == 7
    assert isinstance(hybrid.layers[0].mixer, Mamba2)
    cut = model_of_row("llama3_8b_cut", "meta-llama/Meta-Llama-3-8B (layers=4)", 0.0)
    assert cut.num_layers == 4
    depth = model_of_row("bloom_like", "H14400 F57600 V250k", 200.0)  # layers from the parameter count
    assert depth.num_layers == 79
    with pytest.raises(UnknownModelError, match="the source does not state the shape of its model, bloom_like_181b"):
        model_of_row("bloom_like_181b", "HNone F V250k", 0.0)
    with pytest.raises(UnknownModelError, match=r"the shape of its model, gpt_30b$"):
        model_of_row("gpt_30b(unspecified)", "", 0.0)
