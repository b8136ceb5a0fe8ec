"""Plans for another engine, odd node counts, long runs from short recipes, and scripts of a cluster."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

OUR_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "moe_intermediate_size": 1024,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    folder = tmp_path / "ourmoe"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(OUR_MOE))
    return folder / "config.json"


@pytest.fixture
def saved(meshwright: Any, own_model: Path) -> Path:
    """Save a plan for Megatron."""
    path = own_model.parents[1] / "moe.toml"
    words = ("--engine", "megatron", "--gpus", "16x8xH100", "--goal", "pretrain", "--tokens", "400B")
    meshwright("recommend", str(own_model), *words, "--save", str(path))
    return path


def test_a_saved_plan_keeps_its_engine(meshwright: Any, saved: Path) -> None:
    assert 'engine = "megatron"' in saved.read_text()
    assert meshwright("check", str(saved), "--json").json["engine"] == "megatron"
    plan = meshwright("recommend", str(saved), "--json").json
    assert plan["question"]["engine"] == "megatron"
    assert next(iter(plan["commands"])) == "megatron-lm"  # the engine that was requested comes first
    job = meshwright("launch", str(saved), "--scheduler", "slurm")
    assert "is for megatron: the job runs megatron-lm" in job.err
    assert "pretrain_gpt.py" in job.out
    assert 'engine="megatron"' in meshwright("recipe", str(saved), "--format", "python").out
    moved = meshwright("check", str(saved), "--engine", "meshwright", "--json").json
    assert (moved["ok"], moved["engine"]) == (True, "meshwright")


def test_every_run_line_can_start(meshwright: Any, saved: Path, tmp_path: Path) -> None:
    plan = meshwright("recommend", str(saved), "--json").json
    assert "meshwright" in plan["commands"]  # train has fsdp2 in place of zero1, as check with our engine
    old = tmp_path / "old.toml"  # as saved before files had an engine
    old.write_text(re.sub("engine = .*\n", "", saved.read_text()))
    plan = meshwright("recommend", str(old), "--engine", "megatron", "--json").json
    assert "megatron-lm" in plan["commands"]
    assert "strategy=zero1" in plan["no_command"]["meshwright"]


def test_a_long_run_has_its_own_warmup(meshwright: Any, own_model: Path, saved: Path) -> None:
    assert "warmup_steps = 953" in saved.read_text()  # the recipe of 100 steps has 40
    words = ("recommend", str(own_model), "--gpus", "16x8xH100", "--goal", "pretrain")
    days = {one["field"]: one for one in meshwright(*words, "--days", "3", "--json").json["changes"]}
    assert days["schedule.warmup_steps"]["to"] == days["train.steps"]["to"] // 100
    assert "40 were for 100 steps" in days["schedule.warmup_steps"]["why"]
    typed = meshwright(*words, "--tokens", "400B", "schedule.warmup_steps=50", "--json").json
    assert typed["contract"]["warmup_steps"] == 50
    assert meshwright(*words, "--json").json["contract"]["warmup_steps"] == 40


def test_a_short_run_gets_one_number_of_warmup_steps(meshwright: Any) -> None:
    words = ("--gpus", "16x8xH100", "--goal", "pretrain", "--tokens", "5B")
    ended = meshwright("recommend", "llama3-70b", *words)
    assert set(re.findall(r"schedule.warmup_steps=(\d+)", ended.out)) == {"119"}


def test_check_and_launch_name_the_batch_that_divides(meshwright: Any, saved: Path) -> None:
    """15 nodes of 8 GPUs need pp=15 for a batch of 1024, at half of the speed of 960."""
    on = (str(saved), "--gpus", "15x8xH100")
    answer = meshwright("check", *on, "--json").json
    note, nodes = answer["notes"]
    assert "--gpus 12x8xH100" in nodes
    assert re.search(r"is 1\.9× the time per token of train.global_batch_size=960", note)
    assert note in meshwright("launch", *on, "--scheduler", "slurm").err  # refused
    repair = answer["repair"]["overrides"]
    assert "× the time per token" in meshwright("launch", *on, "--scheduler", "slurm", *repair).err  # written
    words = re.search(r"of (train\S+(?: \S+)*): 1024", meshwright("check", *on, *repair, "--json").json["notes"][0])
    assert words is not None
    faster = meshwright("check", *on, *shlex.split(words[1]), "--json").json
    assert (faster["ok"], faster["notes"]) == (True, [])
    assert 1.8 < answer["repair"]["step_s"] / 1024 * 960 / faster["estimate"]["step_s"] < 2.4


def test_fewer_nodes_are_the_best_count_with_its_own_figure(meshwright: Any, own_model: Path) -> None:
    words = ("recommend", str(own_model), "--engine", "megatron", "--goal", "pretrain", "--json", "--gpus")
    plan = meshwright(*words, "15x8xH100").json
    why = next(one["why"] for one in plan["suggestions"] if one["title"] == "fewer nodes are faster")
    found = re.search(r"--gpus (\S+): estimated (\d+)% less step time", why)
    assert found is not None
    assert found[1] == "12x8xH100"
    fewer = meshwright(*words, found[1]).json
    assert int(found[2]) == round(100 * (1 - fewer["estimate"]["step_s"] / plan["estimate"]["step_s"]))


def test_the_network_of_a_cluster_file_is_read_in_usual_words(meshwright: Any, tmp_path: Path) -> None:
    def asked(line: str) -> Any:
        file = tmp_path / "a100.toml"
        file.write_text(f'gpu = "A100-80"\nnodes = 8\ngpus_per_node = 4\n{line}\n')
        return meshwright("estimate", "llama3_8b_pretrain_config", "--gpus", str(file), "--json")

    ended = asked('network = "100 GbE"')
    assert "did you mean network_gb_s_per_node (of all GPUs of a node) or network_gb_s (of one GPU)?" in ended.out
    speeds = ('"100 GbE"', '"100 Gbit Ethernet"', '"100 Gb/s InfiniBand"', '"12.5 GB/s"', "12.5")
    steps = {asked(f"network_gb_s_per_node = {speed}").json["estimate"]["step_s"] for speed in speeds}
    assert len(steps) == 1


SCRIPT = (
    "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    "torchrun --nproc-per-node 8 --nnodes 16 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
    "--ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 8192 "
    "--max-position-embeddings 8192 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 128256 "
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4 --micro-batch-size 1 "
    "--global-batch-size 1024 --train-iters 95368 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine "
    "--lr-warmup-iters 2000 --lr-decay-iters {decay} --bf16 --overlap-grad-reduce {more} --data-path /data/text "
    "--save /ckpt --load /ckpt --save-interval {every} --tokenizer-type HuggingFaceTokenizer --tokenizer-model /tok\n"
)


def test_a_script_with_a_short_decay_rare_checkpoints_and_no_distributed_optimizer(
    meshwright: Any, tmp_path: Path
) -> None:
    def checked(**words: object) -> dict[str, Any]:
        file = tmp_path / "pretrain.sh"
        file.write_text(SCRIPT.format(**{"decay": 95368, "every": 200, "more": "", **words}))
        return meshwright("check", str(file), "--gpus", "16x8xH100", "--json").json

    def fixes(answer: dict[str, Any]) -> dict[str, list[str]]:
        return {one["rule"]: one["fix"] for one in answer["findings"] if one["severity"] != "advice"}

    found = fixes(checked(decay=50000, every=20000))
    assert found["learning_rate.decay-ends-early"] == ["without --lr-decay-iters"]
    fix, retained = found["saving.rarely"]
    assert retained == "--save-retain-interval 20000"
    after = fixes(checked(every=f"{fix.split()[1]} {retained}"))
    assert not after.keys() & {"learning_rate.decay-ends-early", "saving.rarely"}
    found = fixes(checked(more="--overlap-param-gather"))
    assert found["overlap.gather-needs-sharding"] == ["--use-distributed-optimizer"]
    assert checked(more="--overlap-param-gather --use-distributed-optimizer")["ok"]


def test_no_plan_splits_a_sequence_over_ranks_that_do_not_divide_it(meshwright: Any) -> None:
    words = ("llama3.1-70b", "--goal", "pretrain", "--gpus", "160xH200", "--seq", "8k", "--engine", "automodel")
    plan = meshwright("recommend", *words, "--tokens", "60B", "--json").json
    assert plan["layout"]["cp"] in (1, 2, 4, 8)  # not 5, which AutoModel would pad and our engine refuses
    assert "meshwright" in plan["commands"]
    assert meshwright("recommend", *words, "layout.cp=5", "--json").json["layout"]["cp"] == 5


def test_a_plan_for_deepspeed_tries_every_stage_of_zero(meshwright: Any) -> None:
    words = ("recommend", "qwen2.5-3b", "--gpus", "12x4xA100-80", "--goal", "pretrain", "--engine", "deepspeed")
    stages = ((), ("layout.strategy=zero1",), ("layout.reshard_after_forward=false",), ("layout.strategy=fsdp2",))
    plan, *typed = (
        meshwright(*words, "train.global_batch_size=384", *one, "--json").json["estimate"]["step_s"] for one in stages
    )
    assert plan <= min(typed)


def test_zero_2_is_planned_named_and_exported_where_it_is_faster_and_left_where_it_does_not_fit(
    meshwright: Any, tmp_path: Path
) -> None:
    words = ("recommend", "llama3-8b", "--goal", "sft", "--engine", "deepspeed", "--gpus")
    plan = meshwright(*words, "2x8xH100", "--json").json
    assert (plan["layout"]["strategy"], plan["layout"]["reshard_after_forward"]) == ("fsdp2", False)
    assert "fsdp2 (ZeRO-2) · tp 2" in meshwright(*words, "2x8xH100").out
    meshwright(*shlex.split(plan["commands"]["deepspeed"].removeprefix("meshwright ")))
    assert json.loads(Path("deepspeed/ds_config.json").read_text())["zero_optimization"] == {"stage": 2}
    ranked = meshwright("plan", *words[1:], "2x8xH100", "--json").json["plans"]
    assert ranked[0]["estimate"]["step_s"] == plan["estimate"]["step_s"]
    own = tmp_path / "ds.json"
    own.write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "train_batch_size": 8}')
    fits = ("recommend", str(own), "--model", "llama3-8b", "--gpus", "8xA100-40")
    assert meshwright("check", *fits[1:], "data.seq_length=4096", "layout.recompute=none").code == 1
    leaner = meshwright(*fits, "--json").json
    assert leaner["estimate"]["fits"]
    assert leaner["layout"]["reshard_after_forward"]


@pytest.mark.parametrize(
    "words",
    [
        ("export", "llama3_8b_sft_config", "--to", "torchtitan"),
        ("check", "llama3_8b_sft_config", "--engine", "torchtitan"),
        ("estimate", "llama3_8b_sft_config", "--engine", "torchtitan", "--gpus", "8xH100"),
    ],
)
def test_a_goal_that_the_engine_lacks_is_the_first_reason(meshwright: Any, words: tuple[str, ...]) -> None:
    answer = meshwright(*words, "train.epochs=3")
    assert "configs of torchtitan do not cover fine-tuning of all weights" in answer.out + answer.err
    assert "no epochs" not in answer.out + answer.err


def test_a_file_without_a_length_is_refused_for_its_goal(meshwright: Any, tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n")
    typed = ("--model", "llama3-8b", "--gpus", "8xH100", "--goal", "sft")
    answer = meshwright("export", str(tmp_path / "fsdp.yaml"), "--to", "torchtitan", *typed)
    assert "do not cover fine-tuning of all weights" in answer.err
    assert "--to megatron-bridge" in answer.err


@pytest.mark.parametrize("engine", ["torchtitan", "fsdp1", "deepspeed"])
def test_a_plan_of_a_recipe_for_another_engine_has_kernels_that_its_files_can_say(
    meshwright: Any, engine: str, tmp_path: Path
) -> None:
    """The recipe has the chunked loss of our engine, with which the memory would be another one."""
    file = tmp_path / "plan.toml"
    words = ("recommend", "llama3_8b_pretrain_config", "--gpus", "8xH100", "--engine", engine)
    answer = meshwright(*words, "--save", str(file), "--json").json
    (change,) = (one for one in answer["changes"] if one["field"] == "kernels.loss")
    assert (change["from"], change["to"]) == ("chunked", "vocab_parallel")
    assert "ignores it" in change["why"]
    assert "engine.ignores-loss" not in [one["rule"] for one in answer["findings"]]
    assert "loss =" not in file.read_text()  # the default
    again = meshwright("estimate", str(file), "--json").json
    assert again["estimate"]["memory_gib"]["total"] == answer["estimate"]["memory_gib"]["total"]


def test_a_typed_kernel_stays_and_is_reported(meshwright: Any) -> None:
    words = ("recommend", "llama3_8b_pretrain_config", "--gpus", "8xH100", "--engine", "fsdp1", "kernels.loss=chunked")
    answer = meshwright(*words, "--json").json
    assert not [one for one in answer["changes"] if one["field"] == "kernels.loss"]
    assert "engine.ignores-loss" in [one["rule"] for one in answer["findings"]]
