"""Files of one framework, checked and written for another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LLAMA = """\
from megatron.bridge.recipes.llama import llama3_8b_pretrain_config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

cfg = llama3_8b_pretrain_config()
{lines}
pretrain(cfg, forward_step)
"""


def bridge(tmp_path: Path, *lines: str) -> str:
    """Write a Megatron-Bridge script with these lines, and return its path."""
    path = tmp_path / "train.py"
    path.write_text(LLAMA.format(lines="\n".join(lines)))
    return str(path)


def test_bridge_reads_the_dataset_length_by_its_older_name(meshwright: Any, tmp_path: Path) -> None:
    path = bridge(tmp_path, "cfg.model.seq_length = 16384", "cfg.dataset.sequence_length = 16384")
    older = meshwright("check", path, "--gpus", "8xH200")
    assert older.code == 0
    assert "must equal" not in older.out
    assert "sets the length before Megatron-Bridge 0.6" in older.out
    assert "fix: dataset.seq_length=16384" in older.out
    path = bridge(tmp_path, "cfg.model.seq_length = 16384", "cfg.dataset.seq_length = 16384")
    newer = meshwright("check", path, "--gpus", "8xH200")
    memory = [next(line for line in one.out.splitlines() if line.startswith("Memory")) for one in (older, newer)]
    assert memory[0] == memory[1]


def test_an_attribute_that_bridge_does_not_have_is_reported(meshwright: Any, tmp_path: Path) -> None:
    path = bridge(tmp_path, "cfg.dataset.seqlen = 16384", "cfg.model.bananas = 3")
    found = meshwright("check", path, "--gpus", "8xH200").out
    assert "train.py:6 dataset.seqlen was not checked" in found
    assert "did you mean dataset.seq_length?" in found
    assert "train.py:7 model.bananas was not checked" in found


def test_a_misspelled_attribute_is_removed_as_the_program_spells_it(meshwright: Any, tmp_path: Path) -> None:
    lines = ("cfg.train.train_iter = 2000", "cfg.train.global_batch_size = 100", "cfg.train.micro_batch_size = 3")
    repair = meshwright("check", bridge(tmp_path, *lines), "--gpus", "8xH200", "--json").json["repair"]
    assert "without train.train_iter" in repair["overrides"]


MIXTRAL = """\
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py \\
    --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32 --hidden-size 4096 \\
    --ffn-hidden-size 14336 --num-attention-heads 32 --normalization RMSNorm --position-embedding-type rope \\
    --swiglu --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 \\
    --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 --moe-grouped-gemm \\
    --moe-token-dispatcher-type alltoall --recompute-granularity full --recompute-method uniform \\
    --recompute-num-layers 1 --vocab-size 32000 --tokenizer-type NullTokenizer --mock-data \\
    --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500 --bf16 --use-distributed-optimizer \\
    --attention-dropout 0.0 --hidden-dropout 0.0 {more}
"""


def mixtral(tmp_path: Path, more: str) -> str:
    """Write a Megatron-LM script for Mixtral 8x7B with these flags, and return its path."""
    path = tmp_path / "mixtral.sh"
    path.write_text(MIXTRAL.format(more=more))
    return str(path)


def test_a_rope_base_equal_to_the_published_one_is_no_difference(meshwright: Any, tmp_path: Path) -> None:
    to_automodel = ("--to", "automodel", "--gpus", "8xH200")
    same = meshwright("export", mixtral(tmp_path, "--rotary-base 1000000"), *to_automodel)
    assert "rope_theta" not in same.out + same.err
    stated = meshwright("export", mixtral(tmp_path, "--rotary-base 10000"), *to_automodel)
    assert stated.code == 2
    assert "mixtral_8x7b has 1000000.0" in stated.err
    by_default = meshwright("export", mixtral(tmp_path, ""), *to_automodel)
    assert "architecture.rope_theta=10000.0" in by_default.out
    assert "mixtral_8x7b has 1000000.0" in by_default.out


def test_a_megatron_checkpoint_is_not_written_for_a_loader_of_hugging_face_folders(
    meshwright: Any, tmp_path: Path
) -> None:
    path = bridge(tmp_path, 'cfg.checkpoint.pretrained_checkpoint = "/data/ckpt/llama-megatron"')
    to_automodel = ("--to", "automodel", "--gpus", "8xH200")
    found = meshwright("export", path, *to_automodel).out
    assert "pretrained_model_name_or_path: meta-llama/Meta-Llama-3-8B" in found
    assert "pretrained_model_name_or_path: /data/ckpt" not in found
    assert "is a Megatron checkpoint" in found
    named = meshwright("export", path, *to_automodel, "checkpoint.pretrained=/data/hf/llama").out
    assert "pretrained_model_name_or_path: /data/hf/llama" in named
    assert "is a Megatron checkpoint" not in named
    titan = meshwright("export", path, "--to", "torchtitan", "--gpus", "8xH200")
    assert "/data/ckpt/llama-megatron is a Megatron checkpoint" in titan.out
    assert 'initial_load_path = "/path/to/' in titan.out
    assert "or name it with checkpoint.pretrained=FOLDER" in titan.out


def test_megatron_weights_of_an_unpublished_shape_need_a_converted_folder(meshwright: Any, tmp_path: Path) -> None:
    path = bridge(tmp_path, 'cfg.checkpoint.pretrained_checkpoint = "/data/ckpt/small"', "cfg.model.num_layers = 16")
    found = meshwright("export", path, "--to", "automodel", "--gpus", "8xH200")
    assert found.code == 2
    assert "is a Megatron checkpoint" in found.err
    assert "checkpoint.pretrained=FOLDER" in found.err


def test_a_restart_that_drops_the_optimizer_state_is_reported(meshwright: Any, tmp_path: Path) -> None:
    folders = "--save /lustre/mx --load /lustre/mx --save-interval 100"
    path = mixtral(tmp_path, f"{folders} --rotary-base 1000000 --no-load-optim --no-load-rng")
    found = meshwright("check", path, "--gpus", "8xH200").out
    assert "--no-load-optim --no-load-rng, with --load the folder of --save: every restart loses the optimizer" in found
    assert "fix: without --no-load-optim --no-load-rng" in found
    job = meshwright("launch", path, "--scheduler", "slurm", "--gpus", "8xH200")
    assert "every restart loses the optimizer state; remove them" in job.out + job.err
    tuned = meshwright("check", mixtral(tmp_path, f"{folders} --finetune"), "--gpus", "8xH200").out
    assert "every restart begins at step 0" in tuned
    apart = "--save /lustre/mx --load /lustre/base --save-interval 100 --no-load-optim"
    assert "state-not-loaded" not in meshwright("check", mixtral(tmp_path, apart), "--gpus", "8xH200").out


def test_a_bridge_restart_that_drops_the_optimizer_state_is_reported(meshwright: Any, tmp_path: Path) -> None:
    folders = ('cfg.checkpoint.save = "/lustre/a"', 'cfg.checkpoint.load = "/lustre/a"')
    path = bridge(tmp_path, *folders, "cfg.checkpoint.load_optim = False")
    found = meshwright("check", path, "--gpus", "8xH200").out
    assert "checkpoint.load_optim=false, with checkpoint.load the folder of checkpoint.save" in found
    assert "fix: checkpoint.load_optim=true" in found


def test_a_bridge_script_with_several_errors_gets_one_repair_that_works(meshwright: Any, tmp_path: Path) -> None:
    sizes = {"tensor": 4, "pipeline": 3}
    lines = [f"cfg.model.{name}_model_parallel_size = {size}" for name, size in sizes.items()]
    lines += ["cfg.model.context_parallel_size = 2", "cfg.model.sequence_parallel = False"]
    lines += ["cfg.train.global_batch_size = 256", "cfg.train.micro_batch_size = 2"]
    answer = meshwright("check", bridge(tmp_path, *lines), "--gpus", "16x8xH200", "--json").json
    overrides = answer["repair"]["overrides"]
    assert answer["repair"]["removes"]
    spelled = {"null": "None", "true": "True", "false": "False"}
    pairs = [one.split("=", 1) for one in overrides]
    fixed = [f"cfg.{key} = {spelled.get(value, value)}" for key, value in pairs]
    assert meshwright("check", bridge(tmp_path, *lines, *fixed), "--gpus", "16x8xH200").code == 0


def test_a_switch_before_the_arguments_of_the_script_is_on(meshwright: Any, tmp_path: Path) -> None:
    path = tmp_path / "run_train.sh"
    path.write_text(
        "torchrun --nnodes=1 --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b "
        '--training.steps 2000 --checkpoint.enable "$@"\n'
    )
    found = meshwright("check", str(path), "--gpus", "8xH200").out
    assert "checkpoint.enable = $@" not in found
    assert "checkpoint.enable" not in found.partition("Findings")[2]


def test_a_script_does_not_list_as_missing_what_it_sets(meshwright: Any, tmp_path: Path) -> None:
    path = bridge(tmp_path, "cfg.model.tensor_model_parallel_size = 2", "cfg.model.sequence_parallel = False")
    out = tmp_path / "titan"
    schedule = ("layout.pp=1", "layout.vp=1", "layout.pp_schedule=interleaved_1f1b")
    found = meshwright("export", path, "--to", "torchtitan", "--gpus", "8xH200", "--out", str(out), *schedule).out
    assert "layout.sp=False: torchtitan would use True with config.toml; run_0.3.0.sh and run.sh set it" in found
    assert "layout.sp=False" in (out / "config.toml").read_text()
    script = (out / "run.sh").read_text()
    assert "layout.sp" not in script
    assert "--parallelism.no_enable_sequence_parallel" in script
    assert "pipeline_parallel_schedule" not in script


def test_the_split_of_random_tokens_names_the_key_of_bridge(meshwright: Any, tmp_path: Path) -> None:
    path = mixtral(tmp_path, "--rotary-base 1000000 --split 99990,8,2")
    refused = meshwright("export", path, "--to", "megatron-bridge", "--gpus", "8xH200")
    assert (refused.code, "no bridge for MixtralForCausalLM" in refused.err) == (2, True)
    words = Path(path).read_text().split()
    start = words.index("--num-experts")  # without experts, it is Mistral 7B
    dense = words[:start] + words[words.index("--recompute-granularity") :]
    Path(path).write_text(" ".join(word for word in dense if word != "\\"))
    found = meshwright("export", path, "--to", "megatron-bridge", "--gpus", "8xH200").out
    assert "has no key for it" not in next(line for line in found.splitlines() if "data.validation_part" in line)
    named = meshwright("export", path, "--to", "megatron-bridge", "--gpus", "8xH200", "data.dataset=/data/tokens").out
    assert "data.validation_part" not in named
    assert "split" in named


AUTOMODEL = Path(__file__).parents[1] / "frameworks" / "automodel" / "sft.yaml"


def test_automodel_averages_the_loss_over_the_tokens_of_a_step(meshwright: Any, tmp_path: Path) -> None:
    assert "per_token_loss = true" in meshwright("import", str(AUTOMODEL), "--gpus", "8xH200").out
    job = meshwright("export", str(AUTOMODEL), "--to", "megatron-bridge", "--gpus", "8xH200").out
    assert "model.calculate_per_token_loss=true" in job
    for to in ("accelerate", "deepspeed"):  # the Trainer averages over them too
        assert "per_token_loss" not in meshwright("export", str(AUTOMODEL), "--to", to, "--gpus", "8xH200").out
    compared = meshwright(
        "compare", "llama3-8b", "--gpus", "8xH200", "--goal", "sft", "--engines", "automodel,megatron"
    )
    assert "per_token_loss" not in compared.out


def test_a_loss_averaged_over_samples_is_lost_in_automodel(meshwright: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    lines = (
        "cfg.checkpoint.pretrained_checkpoint = '/ckpt/llama3-8b'",
        "cfg.model.calculate_per_token_loss = False",
        "cfg.train.train_iters = 100",
    )
    text = LLAMA.format(lines="\n".join(lines)).replace("pretrain_config", "sft_config")
    script.write_text(
        text.replace("pretrain import pretrain", "finetune import finetune").replace("pretrain(", "finetune(")
    )
    shown = meshwright("export", str(script), "--to", "automodel", "--gpus", "8xH200").out
    assert "train.per_token_loss=False: NeMo AutoModel would use True" in shown
    assert "not in this file: checkpoint.pretrained" not in shown  # the published weights, which the file names
