"""Kinds of unseen repositories: launchers, flags of forks, files for older versions, configs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import check
from meshwright.similar import closest

MEGATRON = (
    "pretrain_gpt.py --tensor-model-parallel-size 3 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 128 --train-iters 1000 --lr 3e-4 --bf16 "
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model x --data-path d --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear"
)
LAUNCHES = {
    "ft_launcher": f"ft_launcher --nproc_per_node=8 --nnodes=1 --ft-param-rank_heartbeat_timeout=60 {MEGATRON}",
    "dlrover": f"dlrover-run --nnodes=1 --nproc_per_node=8 --network-check {MEGATRON}",
    "colossalai": f"colossalai run --nproc_per_node 8 --hostfile hosts {MEGATRON}",
    "composer": f"composer -n 8 {MEGATRON}",
    "mpirun": f"mpirun -np 8 --allow-run-as-root -x PATH --mca btl tcp,self --bind-to none python {MEGATRON}",
    "mpiexec": f"mpiexec -n 8 --ppn 8 --cpu-bind depth -d 16 python3 {MEGATRON}",
    "enroot": f"enroot start --rw --mount .:/w --env X=1 box bash -c 'torchrun --nproc_per_node 8 {MEGATRON}'",
    "kubectl": f"kubectl exec -it pod-0 -n team -- torchrun --nproc_per_node 8 {MEGATRON}",
    "runai": f"runai submit train -i image -g 8 -- torchrun --nproc_per_node 8 {MEGATRON}",
    "podman-hpc": f"srun -N 1 podman-hpc run --rm --gpu image torchrun --nproc_per_node 8 {MEGATRON}",
    "shifter": f"srun -N 1 --ntasks-per-node 8 shifter --image=x python {MEGATRON}",
    "ssh": f'ssh -p 22 node1 "cd /w && torchrun --nproc_per_node 8 {MEGATRON}"',
    "pdsh": f'pdsh -w node1 "cd /w && torchrun --nproc_per_node 8 --nnodes 1 {MEGATRON}"',
}


def errors(path: Path, **options: str) -> set[str]:
    return {one.rule for one in check(str(path), **options).findings if one.severity == "error"}


def warnings(path: Path) -> set[str]:
    return {one.rule for one in check(str(path)).findings if one.severity == "warning"}


@pytest.mark.parametrize("launcher", LAUNCHES)
def test_a_launcher_is_read_with_its_number_of_ranks(tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/bash\n{LAUNCHES[launcher]}\n")
    assert {"heads.attention", "topology.world"} <= errors(script)


@pytest.mark.parametrize("launcher", ["aprun -n 8 -N 8", "jsrun -n 1 -a 8 -g 8", "flux run -N 1 -n 8 -g 1"])
def test_a_launcher_of_a_supercomputer_is_read(tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{launcher} python3 {MEGATRON}\n")
    assert "heads.attention" in errors(script)


def test_mpi_ranks_of_several_nodes(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"mpirun -np 18 -npernode 6 python {MEGATRON}\n")
    found = {one.rule: one.message for one in check(str(script)).findings}
    assert "topology.world" not in found
    assert "heads.attention" in found
    script.write_text(f"mpirun -np 16 -npernode 8 python {MEGATRON}\n")
    assert "16 GPUs" in {one.rule: one.message for one in check(str(script)).findings}["topology.world"]


def test_a_skypilot_task_is_read_with_its_lines(tmp_path: Path) -> None:
    task = tmp_path / "task.yaml"
    task.write_text(
        "resources:\n  accelerators: H100:8\nnum_nodes: 1\nenvs:\n  TP: 3\nrun: |\n"
        f"  torchrun --nproc_per_node $SKYPILOT_NUM_GPUS_PER_NODE --nnodes $SKYPILOT_NUM_NODES "
        f"{MEGATRON.replace('size 3', 'size $TP')}\n"
    )
    found = [one for one in check(str(task)).findings if one.rule == "topology.world"]
    assert found
    assert "8 GPUs" in found[0].message
    assert {one.line for one in check(str(task)).findings if one.rule == "heads.attention"} == {5}


def test_a_service_file_with_run_is_no_task(tmp_path: Path) -> None:
    task = tmp_path / "ci.yaml"
    task.write_text("jobs:\n  a:\n    steps:\n    - run: |\n        echo x\n")
    with pytest.raises(Exception, match="matches no supported framework"):
        check(str(task))


def test_flags_of_a_fork_have_underscores(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    words = [word.replace("-", "_") if word.startswith("--") else word for word in MEGATRON.split()]
    flags = " ".join(word.replace("__", "--", 1) for word in words).replace("pretrain_gpt", "finetune")
    script.write_text(f"torchrun --nproc_per_node 8 {flags}\n")
    assert {"heads.attention", "topology.world"} <= errors(script)
    assert not {"key.unknown", "megatron-lm.max-connections"} & errors(script)
    assert "key.unknown" in warnings(script)


def test_one_flag_with_an_underscore_is_a_mistake(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun --nproc_per_node 8 {MEGATRON.replace('--seq-length', '--seq_length')}\n")
    assert "key.unknown" in errors(script)


def test_another_finetune_program_is_not_megatron(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python finetune.py --base_model x --data_path y --micro_batch_size 4 --cutoff_len 512\n")
    with pytest.raises(Exception, match="matches no supported framework"):
        check(str(script))


def test_a_file_for_an_older_version_has_warnings(tmp_path: Path) -> None:
    script, right = tmp_path / "run.sh", MEGATRON.replace("size 3", "size 1")
    old = "--DDP-impl local --no-async-tensor-model-parallel-allreduce --moe-capacity-factor 1 --moe-num-experts 64"
    script.write_text(f"torchrun --nproc_per_node 8 {right} {old}\n")
    assert errors(script) == set()
    assert {"key.removed", "key.unknown"} <= warnings(script)
    script.write_text(f"torchrun --nproc_per_node 8 {right} --DDP-impl local\n")
    assert errors(script) == {"key.removed"}
    script.write_text(f"torchrun --nproc_per_node 8 third_party/Megatron-LM/{right} --DDP-impl local\n")
    assert errors(script) == set()


def test_a_typing_error_stays_one_beside_old_flags(tmp_path: Path) -> None:
    script, right = tmp_path / "run.sh", MEGATRON.replace("size 3", "size 1")
    script.write_text(
        f"torchrun --nproc_per_node 8 {right} --DDP-impl local --no-async-tensor-model-parallel-allreduce "
        "--weight-decya 0.1\n"
    )
    assert errors(script) == {"key.unknown"}


def test_a_torchtitan_file_of_the_first_releases_has_warnings(tmp_path: Path) -> None:
    config = tmp_path / "old.toml"
    config.write_text(
        '[job]\nprint_args = true\n[model]\nname = "llama3"\nflavor = "8B"\nconfig = "x.json"\n'
        "[training]\nbatch_size = 8\nseq_len = 2048\ndata_parallel_shard_degree = -1\nnum_workers = 8\nseed = 1\n"
        'dataset = "org/texts"\ncompile = false\n'
    )
    assert errors(config) == set()
    assert "key.removed" in warnings(config)


def test_a_value_of_an_older_llama_factory_is_a_warning(tmp_path: Path) -> None:
    config = tmp_path / "qlora.yaml"
    config.write_text(
        "model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct\nquantization_bit: 4\n"
        "quantization_method: bitsandbytes\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_target: all\n"
        "dataset: identity\ntemplate: llama3\ncutoff_len: 2048\noutput_dir: out\nper_device_train_batch_size: 1\n"
        "learning_rate: 1.0e-4\n"
    )
    assert errors(config) == set()
    found = [one for one in check(str(config)).findings if one.rule == "value.invalid"]
    assert found
    assert "older versions accept" in found[0].message
    assert "bnb" in str(found[0].fix)


ARGUMENTS = (
    "--model_name_or_path meta-llama/Llama-3.2-1B --per_device_train_batch_size 4 --learning_rate 2e-5 --bf16 True "
    "--output_dir out --num_train_epochs 1 --gradient_accumulation_steps 2"
)


def test_a_deepspeed_config_of_another_machine_is_a_warning(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"deepspeed --num_gpus 8 train.py --deepspeed /data/me/ds_z3.json {ARGUMENTS}\n")
    found = check(str(script))
    assert {(one.rule, one.severity) for one in found.findings} >= {("launch.missing-config", "warning")}
    assert not [one for one in found.findings if one.severity == "error"]
    assert found.recipe is not None
    assert found.recipe.layout.micro_batch_size == 4
    assert found.recipe.optimizer.lr == pytest.approx(2e-5)


def test_a_deepspeed_config_that_its_folder_lacks_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    script = tmp_path / "run.sh"
    script.write_text(f"deepspeed --num_gpus 8 train.py --deepspeed configs/zero_3.json {ARGUMENTS}\n")
    found = [one for one in check(str(script)).findings if one.rule == "launch.missing-config"]
    assert [one.severity for one in found] == ["error"]
    assert found[0].fix == ("--deepspeed configs/zero3.json",)
    script.write_text(f"cd $WORK\ndeepspeed --num_gpus 8 train.py --deepspeed configs/zero_3.json {ARGUMENTS}\n")
    assert "launch.missing-config" in warnings(script)


def test_an_accelerate_config_of_another_machine_is_a_warning(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"accelerate launch --config_file /data/fsdp.yaml --num_processes 8 train.py {ARGUMENTS}\n")
    assert errors(script, gpus="8xH100") == set()
    assert "launch.missing-config" in warnings(script)


def test_target_modules_all_are_all_linear_layers(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"torchrun --nproc_per_node 2 training.py {ARGUMENTS} --use_peft True --target_modules all --lora_rank 8\n"
    )
    assert errors(script) == set()


def test_a_zero_warmup_of_deepspeed_is_a_warning(tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(
        '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}, '
        '"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, '
        '"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0, "warmup_max_lr": 1e-4}}}'
    )
    assert "deepspeed.zero-warmup" in warnings(config)
    assert "deepspeed.zero-warmup" not in errors(config)


def test_a_shortened_plural_is_understood(tmp_path: Path) -> None:
    assert closest("num_procs", ["num_processes", "num_machines"]) == ["num_processes"]
    config = tmp_path / "accelerate.yaml"
    config.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_procs: 8\n")
    found = [one for one in check(str(config)).findings if one.field == "num_procs"]
    assert [one.severity for one in found] == ["error"]
    assert "num_processes" in found[0].message


def test_the_data_of_a_fork_is_named_by_its_own_flag(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    right = MEGATRON.replace("size 3", "size 1").replace("--data-path d", "--train-weighted-split-paths-path w.txt")
    script.write_text(f"torchrun --nproc_per_node 8 {right}\n")
    assert errors(script) == set()
    script.write_text(f"torchrun --nproc_per_node 8 {right.replace('--train-weighted-split-paths-path w.txt', '')}\n")
    assert errors(script) == {"megatron-lm.no-data"}


@pytest.mark.parametrize("config", ["", "--deepspeed --deepspeed_config ds.json"])
def test_an_evaluation_takes_sizes_of_the_checkpoint(tmp_path: Path, config: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "torchrun --nproc_per_node 1 tasks/eval_harness/evaluate.py --load c --num-layers -1 --hidden-size -1 "
        "--num-attention-heads -1 --seq-length -1 --max-position-embeddings -1 --micro-batch-size 12 "
        f"--tensor-model-parallel-size 1 --vocab-file v --merge-file m {config}\n"
    )
    assert errors(script) == set()
