"""Verdicts, fixes and hints that can be followed as they are printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.clusters import cluster
from meshwright.errors import InputError

CLUSTER = """\
gpu = "GH200"
nodes = 24
gpus_per_node = 4
network_gb_s_per_node = "800 Gb/s"
"""
OWN_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
OWN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2560, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 8192,
    "moe_intermediate_size": 1280, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
MOE_SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=24
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
srun torchrun --nproc_per_node 4 --nnodes 24 --rdzv_backend c10d --rdzv_endpoint $HEAD:6000 pretrain_gpt.py \\
  --num-layers 48 --hidden-size 2560 --num-attention-heads 32 --group-query-attention --num-query-groups 4 \\
  --kv-channels 128 --qk-layernorm --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope \\
  --rotary-base 1000000 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear \\
  --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 \\
  --num-experts 128 --moe-router-topk 8 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 \\
  --moe-grouped-gemm --moe-token-dispatcher-type alltoall --ffn-hidden-size 8192 \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --expert-model-parallel-size 16 \\
  --use-distributed-optimizer --sequence-parallel --expert-tensor-parallel-size 1 \\
  --micro-batch-size 1 --global-batch-size 768 --train-iters 100000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine \\
  --lr-warmup-iters 2000 --weight-decay 0.1 --clip-grad 1.0 --bf16 --data-path /data/corpus_text_document \\
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/tok128k --vocab-size 128256 \\
  --save /scratch/ckpt --load /scratch/ckpt --save-interval 500
"""
TITAN = """\
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
converters = ["float8"]

[training]
local_batch_size = 2
seq_len = 8192
steps = 20000
dataset = "c4"

[parallelism]
tensor_parallel_degree = 4

[checkpoint]
enable = true
interval = 500

[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
precompute_float8_dynamic_scale_for_fsdp = true
"""

DEEPSPEED = {
    "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0, "train_batch_size": 512, "train_micro_batch_size_per_gpu": 1,
}  # fmt: skip
DEEPSPEED_SCRIPT = """#!/bin/bash
deepspeed --num_nodes 24 --num_gpus 4 --hostfile hosts run_clm.py --deepspeed ds_z3.json --dataset_name c4 \\
  --do_train --bf16 --per_device_train_batch_size 1 --gradient_accumulation_steps 4 --learning_rate 3e-4 \\
  --max_steps 3000 --save_steps 1000 --gradient_checkpointing --output_dir out
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text(CLUSTER, encoding="utf-8")
    for name, config in (("m13", OWN_MODEL), ("moe60", OWN_MOE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "moe_v2.sbatch").write_text(MOE_SCRIPT, encoding="utf-8")
    (tmp_path / "tt8b.toml").write_text(TITAN, encoding="utf-8")
    return tmp_path


def test_a_file_of_another_size_than_model_is_an_error(meshwright: Any, here: Path) -> None:
    typed = ("check", "moe_v2.sbatch", "--gpus", "cluster.toml", "--model", "moe60")
    found = meshwright(*typed)
    assert found.code == 1
    assert "the file and --model contradict each other" in found.out.splitlines()[0]
    answer = json.loads(meshwright(*typed, "--json").out)
    (one,) = (one for one in answer["findings"] if one["rule"] == "model.contradicts")
    assert one["severity"] == "error"
    assert one["fix"] == ["--moe-ffn-hidden-size 1280"]
    assert "the file trains 388" in one["message"]


def test_import_replaces_a_model_that_the_file_contradicts(meshwright: Any, here: Path) -> None:
    typed = ("import", "moe_v2.sbatch", "--gpus", "cluster.toml", "--model", "moe60", "--json")
    findings = json.loads(meshwright(*typed).out)["findings"]
    (one,) = (one for one in findings if one["rule"].startswith("model."))
    assert (one["rule"], one["severity"]) == ("model.differs", "warning")
    assert "the file trains 388" in one["message"]


def test_the_file_with_the_fix_agrees_with_model(meshwright: Any, here: Path) -> None:
    fixed = MOE_SCRIPT.replace("--ffn-hidden-size 8192", "--ffn-hidden-size 8192 --moe-ffn-hidden-size 1280")
    (here / "moe_v2.sbatch").write_text(fixed, encoding="utf-8")
    answer = json.loads(
        meshwright("check", "moe_v2.sbatch", "--gpus", "cluster.toml", "--model", "moe60", "--json").out
    )
    assert not [one for one in answer["findings"] if one["rule"].startswith("model.")]


@pytest.mark.parametrize("option", ["--container", "--container-image", "--docker-image"])
def test_launch_names_the_option_of_an_image(meshwright: Any, here: Path, option: str) -> None:
    image = "nvcr.io/nvidia/pytorch:25.09-py3"
    typed = ("launch", "llama3_8b_pretrain_config", "--slurm", "--time", "8:00:00", "--requeue", option, image)
    found = meshwright(*typed)
    assert found.code == 2
    assert f"fix:   --scheduler slurm --image {image}" in found.err


def test_an_advantage_within_the_uncertainty_says_so(meshwright: Any, here: Path) -> None:
    typed = ("compare", "moe60", "--gpus", "cluster.toml", "--goal", "pretrain", "--seq", "8k")
    answer = json.loads(meshwright(*typed, "--engines", "meshwright,megatron", "--json").out)
    first, second = answer["sides"]
    bands = [one["estimate"]["band"] for one in (first, second)]
    assert bands[0]["step_high_s"] > bands[1]["step_low_s"]  # they overlap widely
    assert "within the uncertainty" in second["reasons"][0]
    assert "faster than" not in answer["answer"] or "within their uncertainty" in answer["answer"]


def test_compare_shows_that_weights_stay_gathered() -> None:
    from meshwright.cli.compare_report import _side_lines, _side_row

    layout = {"strategy": "fsdp2", "tp": 1, "pp": 1, "micro_batch_size": 1, "recompute": "none", "offload": "none"}
    change = {"field": "layout.reshard_after_forward", "from": True, "to": False, "kind": "layout"}
    moved = {"field": "layout.micro_batch_size", "from": 2, "to": 1, "kind": "layout"}
    estimate = {"fits": True, "fit": "fits", "step_s": 1.0, "tokens_per_s_per_gpu": 1.0, "mfu": 0.5}
    estimate |= {"memory_gib": {"total": 83.0, "capacity": 96.0}, "band": {"step_low_s": 0.9, "step_high_s": 1.1}}
    side = {"rank": 1, "name": "torchtitan", "engine": "torchtitan", "layout": layout, "estimate": estimate,
            "changes": [change, moved], "reasons": ["fits"], "cannot": [], "lost": [], "findings": []}  # fmt: skip
    assert "weights stay gathered" in _side_row(side)[2]
    lines = " ".join(_side_lines(side))
    assert "layout.reshard_after_forward True → False" in lines
    assert "micro_batch_size" not in lines


def test_a_baseline_counts_what_the_totals_count_and_is_no_target(meshwright: Any, here: Path) -> None:
    (here / "ds").mkdir()
    (here / "ds" / "ds_z3.json").write_text(json.dumps(DEEPSPEED), encoding="utf-8")
    (here / "ds" / "run_ds.sh").write_text(DEEPSPEED_SCRIPT, encoding="utf-8")
    written = meshwright("check", "ds", "--write-baseline", "ds/base.json", "--gpus", "24x4xGH200")
    assert len(json.loads((here / "ds" / "base.json").read_text(encoding="utf-8"))["findings"]) == 2  # of each file
    assert "wrote ds/base.json: 1 known finding" in written.err
    again = meshwright("check", "ds", "--baseline", "ds/base.json", "--gpus", "24x4xGH200")
    assert again.out.splitlines()[-1] == "2 files checked, 1 finding ignored"
    assert "base.json" not in again.out
    without = meshwright("check", "ds", "--gpus", "24x4xGH200")
    assert "base.json: a baseline of known findings" in without.out


@pytest.mark.parametrize(
    "text", ["4x200 Gb/s", "4 x 200Gb/s", "4×200 Gb/s", "4x 200 Gb/s InfiniBand", "4 NICs of 200 Gb/s", "4x200Gbps HDR"]
)
def test_ports_of_a_node_are_added(here: Path, text: str) -> None:
    written = CLUSTER.replace("800 Gb/s", text)
    (here / "cluster.toml").write_text(written, encoding="utf-8")
    assert cluster("cluster.toml").gpu.network_gb_s == pytest.approx(25)


def test_ports_of_one_gpu_are_refused_with_both_forms(here: Path) -> None:
    for text, fails in (("4x200 Gb/s", True), ("4x200 Gb/s per node", False)):
        network = f'network_gb_s = "{text}"'
        (here / "c.toml").write_text(CLUSTER.replace('network_gb_s_per_node = "800 Gb/s"', network), encoding="utf-8")
        if not fails:
            assert cluster("c.toml").gpu.network_gb_s == pytest.approx(25)
            continue
        with pytest.raises(InputError) as error:
            cluster("c.toml")
        assert 'network_gb_s_per_node = "4x200 Gb/s"' in str(error.value)
        assert 'network_gb_s = "200 Gb/s"' in str(error.value)


def test_a_warning_names_the_fix_of_another_line_that_resolves_it(meshwright: Any, here: Path) -> None:
    found = meshwright("check", "tt8b.toml").out
    assert "no change of this file's settings" not in found
    assert found.count("the fix of line 5 resolves it") == 2


def test_a_planned_length_below_the_models_says_where_it_comes_from(meshwright: Any, here: Path) -> None:
    found = meshwright("recommend", "m13", "--gpus", "24x4xGH200", "--goal", "pretrain")
    assert "m13 has 8,192 positions: --seq 8192 trains on all" in " ".join(found.out.split())


def test_a_faster_value_that_is_not_chosen_has_its_reason(meshwright: Any, here: Path) -> None:
    fixed = MOE_SCRIPT.replace("--ffn-hidden-size 8192", "--ffn-hidden-size 8192 --moe-ffn-hidden-size 1280")
    (here / "moe_v3.sbatch").write_text(fixed, encoding="utf-8")
    found = json.loads(meshwright("plan", "moe_v3.sbatch", "--gpus", "cluster.toml", "--top", "1", "--json").out)
    reasons = [one["why"] for one in found["plans"][0]["changes"] if ": -" in one["why"]]
    assert all("leave too little for an error of the estimate" in one for one in reasons)


def test_size_names_the_batch_with_which_the_own_gpus_are_enough(meshwright: Any, here: Path) -> None:
    typed = ("size", "m13", "--goal", "pretrain", "--gpu", "cluster.toml", "--tokens", "1.5T", "--seq", "8k")
    found = meshwright(*typed, "--days", "28", "--max-gpus", "96").out
    assert "your 96 GPUs are enough with train.global_batch_size=576" in " ".join(found.split())


def test_size_names_the_batch_that_divides_by_the_own_gpus(meshwright: Any, here: Path) -> None:
    typed = ("size", "m13", "--goal", "pretrain", "--gpu", "cluster.toml", "--tokens", "1.5T", "--seq", "8k")
    found = " ".join(meshwright(*typed, "--max-gpus", "96").out.split())
    assert re.search(
        r"your 96 GPUs train 1\.[1-9]\d times the tokens per second with train\.global_batch_size=\d+: [\d.]+ days in "
        r"place of [\d.]+ days; \d+ divides into few layouts of 96 GPUs; a new experiment",
        found,
    )
    kept = meshwright(*typed, "--max-gpus", "96", "train.global_batch_size=512").out
    assert "divides into few layouts" not in kept


@pytest.mark.parametrize("text", ["GB200-NVL72", "1x72xGB200"])
def test_one_rack_needs_no_network(text: str) -> None:
    from meshwright.clusters import assumptions

    assert cluster(text).world == 72
    assert [one.field for one in assumptions(text)] == ["nodes"]
    assert "one rack of 72 GPUs" in assumptions(text)[0].message


OWN_RECIPE = """\
name = "m13"
model = "m13"
goal = "pretrain"
cluster = "cluster.toml"

[data]
seq_length = 8192

[train]
global_batch_size = 576
steps = 317892

[layout]
cp = 2
micro_batch_size = 3
defer_grad_sync = false

[kernels]
compile = true
"""


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("4:00:00", "the job gives up after 100: --max-requeues"),
        ("8:00:00", "a longer --time has fewer"),
        ("24:00:00", ""),
    ],
)
def test_launch_warns_of_many_requeues(meshwright: Any, here: Path, time: str, expected: str) -> None:
    (here / "m13.toml").write_text(OWN_RECIPE, encoding="utf-8")
    words = ("launch", "m13.toml", "--scheduler", "slurm", "--time", time, "--out", "runs/m13")
    found = meshwright(*words)  # the job reads the recipe where it is, with the cluster file beside it
    assert found.code == 0, found.err
    text = found.out + found.err
    assert (f"requeues of --time {time}" in text) == bool(expected)
    assert expected in text


def test_size_and_launch_keep_the_same_checkpoints(meshwright: Any, here: Path) -> None:
    typed = ("moe60", "--goal", "pretrain")
    sized = meshwright("size", *typed, "--engine", "megatron", "--gpu", "cluster.toml", "--max-gpus", "16", "--tokens",
                       "2T", "--seq", "8k", "--json")  # fmt: skip
    storage = json.loads(sized.out)["storage"]
    job = meshwright("launch", *typed, "--gpus", "cluster.toml", "--to", "megatron-lm", "--scheduler", "slurm",
                     "train.steps=317892", "data.seq_length=8192")  # fmt: skip
    assert f"{storage['kept']} checkpoints of {storage['checkpoint_gib']:,.1f} GiB kept" in job.out + job.err


def test_the_fix_of_memory_leaves_headroom(meshwright: Any, here: Path) -> None:
    (here / "m13.toml").write_text(OWN_RECIPE, encoding="utf-8")
    typed = ("launch", "m13.toml", "--scheduler", "slurm", "--to", "megatron-lm", "--time", "24:00:00")
    refused = meshwright(*typed)
    assert refused.code == 1
    fix = refused.err.split("fix:")[1].split()
    assert fix == ["layout.tp=2", "layout.sp=true"]
    followed = meshwright(*typed, *fix)
    assert followed.code == 0, followed.err
    assert "little headroom" not in followed.out + followed.err


@pytest.mark.parametrize(
    ("model", "gpus"), [("qwen3-30b-a3b", "32x8xH100"), ("mixtral-8x7b", "16x8xH100"), ("qwen3-30b-a3b", "32x8xH200")]
)
def test_a_fix_that_takes_memory_is_in_the_layout_that_has_it(meshwright: Any, model: str, gpus: str) -> None:
    words = ("recommend", model, "--gpus", gpus, "--goal", "pretrain", "--engine", "megatron")
    found = meshwright(*words, "--json").json
    [finding] = [one for one in found["findings"] if one["rule"] == "precision.bf16-reduction"]
    fixed = meshwright(*words, *finding["fix"], "--json").json
    plain = meshwright(*words, "precision.reduce=fp32", "--json").json
    assert "precision.reduce=fp32" in finding["fix"]
    assert not [one for one in fixed["findings"] if one["severity"] == "warning"]
    assert fixed["estimate"]["step_s"] <= 1.03 * plain["estimate"]["step_s"]


@pytest.mark.parametrize("words", [("train.global_batch_size=512",), ("--seq", "32k", "train.global_batch_size=128")])
def test_a_fix_for_scarce_memory_is_the_one_that_costs_least(meshwright: Any, tmp_path: Path, words: Any) -> None:
    deeper = {"num_hidden_layers": 44, "intermediate_size": 14336, "vocab_size": 100352}
    (tmp_path / "config.json").write_text(json.dumps({**OWN_MODEL, **deeper}))
    asked = ("recommend", str(tmp_path), "--gpus", "16x8xH100", "--goal", "pretrain", "--engine", "megatron", *words)
    found = meshwright(*asked, "--json").json
    [finding] = [one for one in found["findings"] if one["rule"] == "memory.uncertain"]
    assert "longer per step" not in finding["message"]
    fixed = meshwright(*asked, *finding["fix"], "--json").json
    assert fixed["estimate"]["step_s"] < 1.05 * found["estimate"]["step_s"]
    assert not [one for one in fixed["findings"] if one["rule"].startswith("memory.")]


def test_a_fix_for_scarce_memory_keeps_the_recompute_that_it_counts_on(meshwright: Any) -> None:
    asked = ("recommend", "llama3-8b", "--gpus", "8xRTX4090", "--goal", "peft")
    [finding] = [one for one in meshwright(*asked, "--json").json["findings"] if one["rule"] == "memory.uncertain"]
    fixed = meshwright(*asked, *finding["fix"], "--json").json
    assert "memory.uncertain" not in [one["rule"] for one in fixed["findings"]]


@pytest.mark.parametrize(
    ("typed", "meant"), [("qwen3-30-a3b", "qwen3_30b_a3b"), ("qwen3-vl-30-a3b", "qwen3_vl_30b_a3b")]
)
def test_a_mistyped_text_model_means_no_model_with_images(meshwright: Any, typed: str, meant: str) -> None:
    found = meshwright("recommend", typed, "--gpus", "8xH100", "--goal", "pretrain", "--json")
    assert found.json["error"]["fix"] == [meant]


def test_a_lower_rate_keeps_the_end_of_the_decay_and_says_nothing(meshwright: Any, tmp_path: Path) -> None:
    """The end of the decay followed the rate as if it had been typed: 2e-9, with a note on the trial."""
    text = (Path(__file__).parents[1] / "frameworks" / "automodel" / "sft.yaml").read_text()
    file = tmp_path / "sft.yaml"
    file.write_text(text.replace("lr: 1e-5", "lr: 5.0e-3"))
    answer = meshwright("check", str(file), "--gpus", "8xH200", "--json")
    (rate,) = (one for one in answer.json["findings"] if one["rule"] == "learning_rate.fine-tuning")
    assert rate["fix"] == ["optimizer.lr: 1.0e-05"]
    assert answer.err == ""


@pytest.mark.parametrize(
    ("typed", "answered"),
    [
        ("zero_optimization.stage=2", "where it sets layout.strategy"),
        ("gradient_clipping=0.5", "did you mean optimizer.clip_grad?\nfix:   optimizer.clip_grad=0.5"),
        ("dataloader.shuffle=false", "without a field here: change it there"),
    ],
)
def test_a_key_of_a_framework_that_is_no_override_says_what_is(meshwright: Any, typed: str, answered: str) -> None:
    answer = meshwright("check", "llama3_8b_sft_config", typed)
    assert answer.code == 2
    assert answered in answer.err
