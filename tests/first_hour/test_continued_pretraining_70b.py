"""Continued pretraining of Llama 3.3 70B: schedules, weights by name, racks, baselines and remedies."""

from __future__ import annotations

from pathlib import Path

import pytest

from .mistakes import call

CLUSTER = 'gpu = "H200"\nnodes = 32\ngpus_per_node = 8\nnetwork_gb_s_per_node = "3200 Gb/s"\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path


CPT = ("llama-3.3-70b", "--gpus", "cluster.toml", "--goal", "cpt", "--seq", "8k", "--engine", "megatron")


def test_the_end_of_the_decay_follows_a_typed_rate() -> None:
    said = call("recommend", *CPT, "optimizer.lr=3e-5", "--json").json
    assert said["contract"]["min_lr"] == pytest.approx(3e-6)
    assert "follows lr" in next(one["why"] for one in said["changes"] if one["field"] == "schedule.min_lr")
    found = call("export", "llama3_70b_pretrain_config", "--to", "megatron-lm", "optimizer.lr=2e-4")
    assert "--min-lr 2e-05" in found.out
    typed = call("recommend", *CPT, "optimizer.lr=3e-5", "schedule.min_lr=3e-5")
    assert "learning_rate.no-decay" in [one["rule"] for one in typed.json["findings"]]
    assert "schedule.min_lr=3e-05" in typed.out  # in the command that exports the plan: it would follow lr


TITAN = (
    '[model]\nname = "llama3"\nflavor = "8B"\n[optimizer]\nlr = 3e-4\n[lr_scheduler]\nmin_lr_factor = {}\n'
    "[training]\nlocal_batch_size = 1\nseq_len = 8192\nsteps = 10000\n"
)
AXOLOTL = (
    "base_model: NousResearch/Meta-Llama-3-8B\nlearning_rate: 1e-5\nlr_scheduler: cosine\ncosine_min_lr_ratio: {}\n"
    "sequence_len: 2048\nmicro_batch_size: 1\noptimizer: adamw_torch\ndatasets:\n  - path: tatsu-lab/alpaca\n"
    "    type: alpaca\n"
)
OWN = (
    'name = "own"\nmodel = "llama3_8b"\ngoal = "pretrain"\ncluster = "8xH100"\n[optimizer]\nlr = 1e-4\n'
    "[schedule]\nmin_lr = {}e-4\n"
)


@pytest.mark.parametrize(("name", "text"), [("a.toml", TITAN), ("a.yaml", AXOLOTL), ("own.toml", OWN)])
@pytest.mark.parametrize(
    ("share", "rule"), [("1.0", "learning_rate.no-decay"), ("1.5", "learning_rate.minimum-above-peak"), ("0.1", "")]
)
def test_a_decay_that_does_not_decay_is_found_in_every_file(
    folder: Path, name: str, text: str, share: str, rule: str
) -> None:
    (folder / name).write_text(text.format(share))
    rules = [one["rule"] for one in call("check", name, "--gpus", "8xH100", "--json").json["findings"]]
    assert [one for one in rules if one in ("learning_rate.no-decay", "learning_rate.minimum-above-peak")] == (
        [rule] if rule else []
    )


def _log(folder: Path, name: str, seconds: float, arguments: str = "", timers: str = "") -> Path:
    """Write a log of 60 steps of Megatron-LM on 256 GPUs."""
    given = {
        "bf16": True,
        "ffn_hidden_size": 28672,
        "global_batch_size": 512,
        "group_query_attention": True,
        "hidden_size": 8192,
        "lr": 3e-05,
        "micro_batch_size": 1,
        "num_attention_heads": 64,
        "num_layers": 80,
        "num_query_groups": 8,
        "num_virtual_stages_per_pipeline_rank": 10,
        "padded_vocab_size": 128256,
        "pipeline_model_parallel_size": 2,
        "seq_length": 8192,
        "sequence_parallel": True,
        "swiglu": True,
        "tensor_model_parallel_size": 4,
        "train_iters": 95368,
        "untie_embeddings_and_output_weights": True,
        "use_distributed_optimizer": True,
        "world_size": 256,
    } | dict(one.split("=") for one in arguments.split())
    lines = ["------------------------ arguments ------------------------"]
    lines += [f"  {key} {'.' * (48 - len(key))} {value}" for key, value in given.items()]
    lines += ["-------------------- end of arguments ---------------------"]
    for step in range(1, 61):
        lines.append(
            f" [2026-11-15 00:{step // 60:02d}:{step % 60:02d}.123456] iteration {step:8d}/   95368 | "
            f"consumed samples: {512 * step:12d} | elapsed time per iteration (ms): {1000 * seconds + step % 3:.1f} | "
            f"learning rate: 3.000000E-05 | global batch size:   512 | lm loss: {1.76 - step / 1000:.6E} | "
            "loss scale: 1.0 | grad norm: 0.379 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
        lines += [timers] if timers else []
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


TIMERS = (
    "(min, max) time across ranks (ms):\n    forward-backward ...............................: (15000.00, 15200.00)\n"
    "    forward-compute ................................: (3100.00, 4777.00)"
)


def test_remedies_can_start(folder: Path) -> None:
    """82 layers with embedding and head do not divide by 2 stages of 10 chunks."""
    found = call("doctor", str(_log(folder, "a.log", 22.6, timers=TIMERS)), "--gpus", "cluster.toml")
    assert "unequal work per stage" in found.out
    assert "--account-for-loss-in-pipeline-split" not in found.out
    _log(folder, "b.log", 22.6, "num_virtual_stages_per_pipeline_rank=None", TIMERS)
    assert "--account-for-loss-in-pipeline-split" in call("doctor", "b.log", "--gpus", "cluster.toml").out


def test_a_baseline_of_the_same_size_says_nothing_about_the_network(folder: Path) -> None:
    _log(folder, "ok.log", 15.9)
    _log(folder, "slow.log", 22.6)
    _log(folder, "other.log", 22.6, "tensor_model_parallel_size=8")
    said = call("doctor", "slow.log", "--baseline", "ok.log", "--gpus", "cluster.toml").out
    assert "256 GPUs, and no setting in the logs differs: a token takes 42% longer than in ok.log" in said
    assert "network between nodes is slow" not in said
    said = call("doctor", "other.log", "--baseline", "ok.log", "--gpus", "cluster.toml").out
    assert "--tensor-model-parallel-size 4" in said
    assert "no setting in the logs differs" not in said
    faster = call("doctor", "ok.log", "--baseline", "slow.log", "--json").json
    assert "speed.slower-than-baseline" not in [one["rule"] for one in faster["findings"]]
    _log(folder, "small.log", 15.9, "world_size=128 global_batch_size=256")
    assert "speed.slow-network" in call("doctor", "slow.log", "--baseline", "small.log", "--gpus", "cluster.toml").out


SCRIPT = """#!/bin/bash
torchrun --nproc_per_node 8 --nnodes 32 --node_rank $SLURM_NODEID --master_addr $MASTER_ADDR pretrain_gpt.py \\
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention \\
    --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 \\
    --position-embedding-type rope --rotary-base 500000 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu \\
    --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear {} \\
    --micro-batch-size 1 --global-batch-size 512 --train-iters 95368 --lr-warmup-iters 2000 --lr 3e-5 --min-lr 3e-6 \\
    --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --bf16 --use-distributed-optimizer \\
    --sequence-parallel --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 \\
    --data-path /lustre/data/cpt_text_document --tokenizer-type HuggingFaceTokenizer \\
    --tokenizer-model meta-llama/Llama-3.3-70B-Instruct --split 99,1,0 --vocab-size 128256 --save-interval 500 \\
    --save /lustre/ckpt/llama70b --ckpt-format torch_dist
"""
WEIGHTS = "--pretrained-checkpoint /lustre/models/llama33-mcore"
SCALED = "--use-rope-scaling --rope-scaling-factor 8.0"


@pytest.mark.parametrize(
    ("flags", "removed", "named"),
    [
        (f"{WEIGHTS} {SCALED}", "", ""),
        ("", "", ""),  # random weights: nothing was trained with a scaled RoPE
        (WEIGHTS, "", "--use-rope-scaling is not set, which differs from llama31_70b: set"),
        (f"{WEIGHTS} --use-rope-scaling --rope-scaling-factor 32.0", "", "--rope-scaling-factor 32 differs"),
        (f"{WEIGHTS} {SCALED} --norm-epsilon 1e-6", "", "--norm-epsilon 1e-06 differs from llama31_70b: 1e-05"),
        (f"{WEIGHTS} {SCALED} --rotary-percent 0.5", "", "--rotary-percent 0.5 differs"),
        (f"{WEIGHTS} {SCALED} --add-qkv-bias", "", "--add-qkv-bias is set, which differs"),
        (f"{WEIGHTS} {SCALED} --qk-layernorm", "", "--qk-layernorm is set, which differs"),
        (f"{WEIGHTS} {SCALED} --window-size 4095,0", "", "--window-size 4095,0 differs from llama31_70b: not set"),
        (f"{WEIGHTS} {SCALED} --apply-layernorm-1p", "", "--apply-layernorm-1p is set, which differs"),
        (f"{WEIGHTS} {SCALED}", "--normalization RMSNorm", "--normalization LayerNorm (not set: the default) differs"),
        (f"{WEIGHTS} {SCALED}", "--disable-bias-linear", "--disable-bias-linear is not set, which differs"),
        (
            f"{WEIGHTS} {SCALED}",
            "--untie-embeddings-and-output-weights",
            "--untie-embeddings-and-output-weights is not",
        ),
    ],
)
def test_what_a_model_computes_is_compared(folder: Path, flags: str, removed: str, named: str) -> None:
    (folder / "a.sh").write_text(SCRIPT.format(flags).replace(removed, "") if removed else SCRIPT.format(flags))
    found = call("check", "a.sh", "--gpus", "cluster.toml", "--model", "llama-3.3-70b", "--json").json["findings"]
    texts = [one["message"] for one in found if one["rule"].startswith("model.")]
    assert any(named in one for one in texts) if named else not texts


def test_the_model_that_the_weights_name_is_compared_too(folder: Path) -> None:
    (folder / "a.sh").write_text(SCRIPT.format(WEIGHTS))
    found = call("check", "a.sh", "--gpus", "cluster.toml", "--json").json["findings"]
    assert [one["fix"] for one in found if one["rule"] == "model.differs-from-name"] == [[SCALED]]


INSTRUCT = "meta-llama/Llama-3.3-70B-Instruct"


@pytest.mark.parametrize("model", [INSTRUCT, "llama-3.3-70b"])
@pytest.mark.parametrize(
    ("to", "line"),
    [
        ("torchtitan", 'initial_load_path = "/path/to/Llama-3.3-70B-Instruct"'),
        ("automodel", f"pretrained_model_name_or_path: {INSTRUCT}"),
    ],
)
def test_the_weights_are_those_of_the_named_model(folder: Path, to: str, line: str, model: str) -> None:
    (folder / "a.sh").write_text(SCRIPT.format(f"{WEIGHTS} {SCALED}"))
    found = call("export", "a.sh", "--to", to, "--gpus", "cluster.toml", "--model", model)
    text = found.out.replace('\\"', '"')
    assert line in text
    assert "Meta-Llama-3" not in text


def test_sizes_do_not_show_whose_weights_a_checkpoint_has(folder: Path) -> None:
    (folder / "a.sh").write_text(SCRIPT.format(f"{WEIGHTS} {SCALED}"))
    found = call("export", "a.sh", "--to", "torchtitan", "--gpus", "cluster.toml", "--out", "out")
    text = (folder / "out" / "config.toml").read_text()
    assert 'initial_load_path = "/path/to/llama33-mcore-hf"' in text
    assert "Meta-Llama-3" not in text
    assert "put its folder in place of /path/to/llama33-mcore-hf" in found.out


def test_racks_in_a_cluster_file_are_racks(folder: Path) -> None:
    (folder / "gb.toml").write_text('gpu = "GB200"\nnodes = 8\ngpus_per_node = 72\nnetwork_gb_s = "400 Gb/s"\n')
    words = ("launch", "llama3-8b", "--goal", "pretrain", "--scheduler", "slurm", "-t", "1-0", "--gpus")
    texts = [call(*words, gpus).out for gpus in ("gb.toml", "8x72xGB200")]
    for text in texts:
        assert "--nodes=144" in text
        assert "--gpus-per-node=4" in text
        assert "8 racks of 72 GPUs, 144x4xGB200: a node of the rack has 4" in text
    (folder / "gb.toml").write_text('gpu = "GB200"\nnodes = 16\ngpus_per_node = 4\n')
    assert "racks of" not in call(*words, "gb.toml").out


def test_weights_to_download_or_convert_refuse_no_engine() -> None:
    words = ("llama3-8b", "--gpus", "8xH200", "--goal", "cpt", "--seq", "4k", "--engines", "megatron,torchtitan")
    sides = {one["name"]: one for one in call("compare", *words, "--json").json["sides"]}
    assert all(one["ok"] and one["estimate"] for one in sides.values())
    download, convert = "download_hf_assets.py --repo_id meta-llama/Meta-Llama-3-8B", "convert_checkpoints.py import"
    assert any(download in one for one in sides["torchtitan"]["reasons"])
    assert any(convert in one for one in sides["megatron"]["reasons"])


TITAN_FUNCTION = """from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer
from . import model_registry

def llama3_70b_telco() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("70B"),
        training=TrainingConfig({}, steps=95368),
        parallelism=ParallelismConfig(tensor_parallel_degree=16),
    )
"""
SAMPLES = "local_batch_size=8, global_batch_size=512, seq_len=8192"
MIXED = "local_batch_size=8, global_batch_size=512, max_context_length=8192"
TOKENS = "num_tokens_per_microbatch_per_dp_rank=65536, num_tokens_per_train_step=4194304, max_context_length=8192"


@pytest.mark.parametrize("lengths", [SAMPLES, MIXED, TOKENS])
def test_keys_of_another_version_count(folder: Path, lengths: str) -> None:
    (folder / "config_registry.py").write_text(TITAN_FUNCTION.format(lengths))
    words = ("check", "config_registry.py", "--gpus", "cluster.toml", "--model", "llama-3.3-70b", "--json")
    found = call(*words, "--advice").json["findings"]
    assert "batch.too-few-tokens" not in [one["rule"] for one in found]  # 16,000 tokens per GPU and step
    fixes = " ".join(text for one in found if one["rule"] != "torchtitan.other-version" for text in one["fix"])
    assert "tensor_parallel_degree=8" in fixes
    if lengths != SAMPLES:  # a file that counts in samples is one of 0.3.0
        assert not any(f"--training.{key}=" in fixes for key in ("local_batch_size", "global_batch_size", "seq_len"))


@pytest.mark.parametrize("word", ["pyxis", "enroot", "nccl-tests", "bus bandwidth", "busbw"])
def test_words_of_clusters_are_explained(word: str) -> None:
    assert call("explain", word).code == 0


def test_an_unused_deviation_is_removed(folder: Path) -> None:
    (folder / "a.sh").write_text(SCRIPT.format(f"{WEIGHTS} {SCALED} --init-method-std 0.0134"))
    found = call("check", "a.sh", "--gpus", "cluster.toml", "--json").json["findings"]
    assert [one["fix"] for one in found if one["rule"] == "weights.init-std-unused"] == [["without --init-method-std"]]
