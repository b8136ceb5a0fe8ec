"""Launch scripts and configs in the style of pretraining repositories and forks of the frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import check
from meshwright.errors import InputError
from meshwright.frameworks.result import CheckResult

FLAGS = """--num-layers 20 --hidden-size 1536 --num-attention-heads 8 --seq-length 4096 --lr 3e-4 --bf16 \\
  --max-position-embeddings 4096 --micro-batch-size 4 --global-batch-size 512 --train-iters 1000 \\
  --tokenizer-type Llama2Tokenizer --tokenizer-model tok.model --swiglu --normalization RMSNorm \\
  --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear"""
DATA = "--data-path data/a"
OWN = "--stage sft --prompt-type qwen --handler-name Alpaca --pad-samples --lora-scale 2"
TRAIN = f"export CUDA_DEVICE_MAX_CONNECTIONS=1\ntorchrun --nproc-per-node 8 PROGRAM {FLAGS} {DATA}"


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def script(folder: Path, flags: str = "", program: str = "pretrain_gpt.py") -> CheckResult:
    return check(written(folder, "train.sh", f"{TRAIN.replace('PROGRAM', program)} {flags}\n"))


def found(result: CheckResult, severity: str = "error") -> list[str]:
    return [one.rule for one in result.findings if one.severity == severity]


@pytest.mark.parametrize("text", ["your data path", "path to the data", "your tokenized/data path"])
def test_words_that_ask_for_a_path_are_one_value(tmp_path: Path, text: str) -> None:
    launch = TRAIN.replace("PROGRAM", "pretrain_gpt.py").replace("data/a", "$DATA --save $OUT --save-interval 100")
    result = check(written(tmp_path, "t.sh", f'OUT="your save path"\nDATA="{text}"\n{launch}\n'))
    assert found(result) == []
    assert {"save", "data_path"} <= {one.key for one in result.unresolved}


def test_a_stray_word_that_asks_for_nothing_is_an_error(tmp_path: Path) -> None:
    assert found(script(tmp_path, "--save out model --save-interval 9")) == ["value.stray"]


@pytest.mark.parametrize("flag", ["--checkpoint-activations", "--tokenizer-type PretrainedFromHF"])
def test_flags_and_values_of_a_program_with_its_own_flags_are_warnings(tmp_path: Path, flag: str) -> None:
    flag = f"{flag} --DDP-impl local"
    assert found(script(tmp_path, f"{flag} --prompt-kind a", "examples/mine/pretrain_own.py")) == []
    assert found(script(tmp_path, "--checkpoint-activations")) == ["key.removed"]


def test_a_program_with_several_flags_of_its_own_validates_its_arguments_itself(tmp_path: Path) -> None:
    two = "--train-data-path data/b"
    assert found(script(tmp_path, two, "pretrain_own.py")) == ["megatron-lm.two-sources"]
    result = script(tmp_path, f"{two} {OWN}", "pretrain_own.py")
    assert found(result) == []
    assert "megatron-lm.two-sources" in found(result, "warning")
    assert "topology.world" in found(script(tmp_path, f"{OWN} --tensor-model-parallel-size 3", "pretrain_own.py"))


SIZES = "export LAYERS=20\nexport TP=2\n"
JOB = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gres=gpu:8
#SBATCH --ntasks-per-node=1
srun scripts/copy.sh
srun scripts/train.sh
"""
RENDEZVOUS = "--node-rank $SLURM_NODEID"  # of a script that every task runs
STEP = f"""export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nnodes $SLURM_NNODES {RENDEZVOUS} --nproc-per-node $SLURM_GPUS_ON_NODE pretrain_gpt.py \\
  {FLAGS.replace("--num-layers 20", "--num-layers $LAYERS")} {DATA} --tensor-model-parallel-size $TP
"""


def test_a_script_that_submits_a_job_is_read_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "scripts/job.sh", JOB)
    written(tmp_path, "scripts/copy.sh", "cp -r data /tmp\n")
    written(tmp_path, "scripts/train.sh", STEP)
    written(tmp_path, "release/small.sh", f"{SIZES}sbatch --job-name=small --nodes=4 scripts/job.sh\n")
    result = check("release/small.sh")
    assert found(result) == []
    assert (result.recipe.layout.tp, result.model and result.model.num_layers) == (2, 20)
    assert "32 GPUs" in " ".join(result.notes)
    written(tmp_path, "scripts/train.sh", STEP.replace(RENDEZVOUS, ""))
    assert found(check("release/small.sh")) == ["launch.node-rank"]
    assert check("scripts/job.sh").framework == "megatron-lm"


def test_a_gpu_name_of_the_site_is_no_error(tmp_path: Path) -> None:
    start = STEP.replace("torchrun", "srun torchrun").replace(RENDEZVOUS, "--rdzv-backend=c10d")
    text = f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:ampere:4\n{start}"
    result = check(written(tmp_path, "j.sh", text))
    assert found(result) == []
    wrong = check(written(tmp_path, "w.sh", text.replace("$TP", "3")))
    assert found(wrong) == ["topology.world"]  # 8 GPUs of any type, and a model of any depth


def test_a_wrapper_around_any_program_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="matches no supported framework"):
        check(written(tmp_path, "run.sh", 'export RANK=$SLURM_PROCID\npython "$@"\n'))


def test_the_program_in_front_of_a_variable_of_flags_is_left_out(tmp_path: Path) -> None:
    text = f'CMD="pretrain_gpt.py {FLAGS.replace(chr(92), "")} {DATA} --pipeline-model-parallel-size 2 '
    text += '--num-layers-per-virtual-pipeline-stage 5"\n./my_launcher $CMD\n'
    result = check(written(tmp_path, "c.sh", text.replace("\n  ", " ")))
    assert found(result) == []
    assert result.recipe.layout.pp == 2


BRIDGE = """run:
  env: {container: a.sqsh, nodes: 2}
recipe:
  _target_: megatron.bridge.recipes.qwen.qwen3_8b_pretrain_config
data:
  blend_file: ${art:data,path}
model:
  seq_length: ${art:data,pack_size}
  tensor_model_parallel_size: 2
dataset:
  sequence_length: ${model.seq_length}
train: {train_iters: 10, global_batch_size: 8}
"""


def test_sections_of_the_program_that_reads_a_bridge_config_are_one_warning(tmp_path: Path) -> None:
    result = check(written(tmp_path, "c.yaml", BRIDGE))
    assert (result.framework, result.model and result.model.name) == ("megatron-bridge", "qwen3_8b")
    assert found(result) == []
    (added,) = (one for one in result.findings if one.rule == "key.unused")
    assert "no data, recipe, run" in added.message
    assert added.line == 2
    wrong = check(written(tmp_path, "w.yaml", BRIDGE.replace("train_iters: 10", "train_itres: 10")))
    assert found(wrong) == ["key.unknown"]


def test_only_the_recipe_of_a_bridge_config_shows_the_framework(tmp_path: Path) -> None:
    start = "\n".join(BRIDGE.splitlines()[2:4])
    assert check(written(tmp_path, "r.yaml", f"{start}\nlogger: {{log_interval: 5}}\n")).framework == "megatron-bridge"


def test_configs_of_nemo_rl_are_named(tmp_path: Path) -> None:
    text = "grpo: {max_num_steps: 9}\nloss_fn: {a: 1}\npolicy: {x: 1}\ncheckpointing: {enabled: true}\nlogger: {b: 1}\n"
    with pytest.raises(InputError, match="config of NeMo-RL"):
        check(written(tmp_path, "grpo.yaml", text))


TITAN = """[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[optimizer]
name = "AdamW"
[[optimizer.split_rules]]
pattern = "output"
[training]
seq_len = 4096
steps = 10
"""


def test_lists_that_a_checkout_of_torchtitan_defines_are_no_errors(tmp_path: Path) -> None:
    for name in ("plain", "own"):
        written(tmp_path / name, "torchtitan/train.py", "")
        written(tmp_path / name, "torchtitan/a.toml", TITAN)
    written(tmp_path / "own", "torchtitan/config.py", "class Optimizer:\n    split_rules: list[dict] = None\n")
    written(tmp_path / "own", "torchtitan/quant.py", 'register(Float8, "float8")\n')
    assert found(check(str(tmp_path / "plain/torchtitan/a.toml"))) == ["value.invalid", "key.unknown"]
    assert found(check(str(tmp_path / "own/torchtitan/a.toml"))) == []


def test_a_key_by_the_name_of_the_checkouts_version_is_set(tmp_path: Path) -> None:
    text = TITAN.replace('converters = ["float8"]\n', "").replace('[[optimizer.split_rules]]\npattern = "output"\n', "")
    text += "compile = true\n[parallelism]\ntensor_parallel_degree = 8\nenable_async_tensor_parallel = true\n"
    written(tmp_path, "torchtitan/train.py", "class Training:\n    compile: bool = False\n")
    assert found(check(written(tmp_path, "torchtitan/a.toml", text))) == []
    without = check(written(tmp_path, "torchtitan/b.toml", text.replace("compile = true\n", "")))
    assert found(without) == ["overlap.async-tensor-parallel"]


def test_settings_behind_a_flag_of_a_fork_are_its_values(tmp_path: Path) -> None:
    start = "torchrun --nproc-per-node 8 torchtitan/train.py --job.config_file c.toml"
    text = f"{start} --cfg_options training.steps=3 checkpoint.folder=a\n"
    rules = found(check(written(tmp_path, "run.sh", text)))
    assert "torchtitan.stray-argument" not in rules
    assert "torchtitan.stray-argument" in found(check(written(tmp_path, "r.sh", f"{start} training.steps=3\n")))


def test_a_script_whose_name_is_made_of_several_variables_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="matches no supported framework"):
        check(written(tmp_path, "s.sh", 'mkdir -p out\nbash jobs/$SIZE$KIND/${NAME}${TAG}.sh "$@"\n'))


STEPS = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=a100:8\n"
SPLIT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"


def test_a_script_that_is_given_the_program_and_its_flags_starts_it(tmp_path: Path) -> None:
    run = f'CMD="pretrain_gpt.py {SPLIT} {FLAGS} {DATA} --save-interval $EVERY"\nsrun --label ./launch.sh $CMD\n'
    result = check(written(tmp_path, "t.sh", f"#!/bin/bash\n{STEPS}export CUDA_DEVICE_MAX_CONNECTIONS=1\n{run}"))
    assert result.recipe.layout.pp == 4
    assert result.cluster is not None
    assert result.cluster.world == 16
    wrong = run.replace("num-attention-heads 8", "num-attention-heads 7")
    result = check(written(tmp_path, "w.sh", f"#!/bin/bash\n{STEPS}{wrong}"))
    assert any("heads" in one.message for one in result.findings if one.severity == "error")


def test_an_unknown_batch_may_be_as_large_as_any_number_of_ranks_needs(tmp_path: Path) -> None:
    job = "#SBATCH --nodes=1024\n#SBATCH --gpus-per-node=a100:8\n"
    run = TRAIN.replace("PROGRAM", "pretrain_gpt.py").replace("--nproc-per-node 8", "--nnodes 1024 --nproc-per-node 8")
    run = run.replace("--global-batch-size 512", "--global-batch-size $((64 * DP))")
    result = check(written(tmp_path, "t.sh", f"#!/bin/bash\n{job}DP=$(nodes)\n{run}\n"))
    assert "batch.smaller-than-data-parallel" not in found(result)


def test_a_constraint_names_the_memory_of_a_gpu(tmp_path: Path) -> None:
    job = "#SBATCH --constraint=v100-32g\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:4\n"
    run = TRAIN.replace("PROGRAM", "pretrain_gpt.py").replace("--nproc-per-node 8", "--nnodes 2 --nproc-per-node 4")
    result = check(written(tmp_path, "t.sh", f"#!/bin/bash\n{job}{run.replace('--bf16', '--fp16')}\n"))
    assert result.cluster is not None
    assert result.cluster.gpu.name == "V100-32"


DEEP = """cat <<EOF > ds.json
{"train_micro_batch_size_per_gpu": 1, "train_batch_size": 512,
 "zero_optimization": {"stage": 0}, "bf16": {"enabled": true}}
EOF
"""


def deepspeed(folder: Path, flags: str) -> CheckResult:
    run = f"torchrun --nnodes 9 --nproc-per-node 8 pretrain_gpt.py --deepspeed --deepspeed_config ds.json {flags}"
    return check(written(folder, "ds.sh", f"{DEEP}export CUDA_DEVICE_MAX_CONNECTIONS=1\n{run}\n"))


OLD_FLAGS = (
    "--num-layers 70 --hidden-size 14336 --num-attention-heads 112 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 1 --global-batch-size 512 --train-iters 100 --lr 1e-4 --bf16 --data-path d "
    "--checkpoint-activations --vocab-file v.json --merge-file m.txt --pipeline-model-parallel-size 72"
)


def test_stages_may_hold_embeddings_alone(tmp_path: Path) -> None:
    assert "pipeline.more-stages-than-layers" in found(deepspeed(tmp_path, OLD_FLAGS))
    by_type = deepspeed(tmp_path, f"{OLD_FLAGS} --pp-partition-method 'type:transformer|embedding'")
    assert found(by_type) == []


def test_bf16_without_zero_shards_the_optimizer_states(tmp_path: Path) -> None:
    assert deepspeed(tmp_path, OLD_FLAGS).recipe.layout.strategy == "zero1"


def test_flags_of_the_first_megatron_are_refused_by_name(tmp_path: Path) -> None:
    first = OLD_FLAGS.replace("--micro-batch-size 1 --global-batch-size 512", "--batch-size 8 --warmup 0.01")
    first = first.replace("--pipeline-model-parallel-size 72", "--model-parallel-size 4")
    with pytest.raises(InputError, match="Megatron-LM 1"):
        deepspeed(tmp_path, first)


def test_a_save_interval_of_zero(tmp_path: Path) -> None:
    assert found(script(tmp_path, f"{DATA} --save out --save-interval 0")) == ["megatron-lm.no-save-interval"]
    assert found(script(tmp_path, f"{DATA} --save-interval 0")) == []  # nothing is saved


def test_a_warm_up_fraction_of_the_whole_run(tmp_path: Path) -> None:
    assert found(script(tmp_path, f"{DATA} --lr-warmup-fraction 1.5")) == ["megatron-lm.warm-up-too-long"]
    assert found(script(tmp_path, f"{DATA} --lr-warmup-fraction 0.01")) == []


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("--bf16", "--bf16 --fp16", "two-dtypes"),
        ("--lr 1e-4", "", "no-learning-rate"),
        ("--train-iters 100", "--train-iters 100 --lr-warmup-iters 100", "warm-up-too-long"),
    ],
)
def test_what_megatron_deepspeed_asserts(tmp_path: Path, old: str, new: str, rule: str) -> None:
    flags = OLD_FLAGS.replace("--pipeline-model-parallel-size 72", "--pipeline-model-parallel-size 2")
    assert f"megatron-deepspeed.{rule}" not in found(deepspeed(tmp_path, flags))
    assert f"megatron-deepspeed.{rule}" in found(deepspeed(tmp_path, flags.replace(old, new)))


def test_torchtitan_divides_by_the_checkpoint_interval(tmp_path: Path) -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nsteps = 100\nseq_len = 4096\n'
    text += "[checkpoint]\nenable = {}\ninterval = 0\n"
    assert found(check(written(tmp_path, "a.toml", text.format("true")))) == ["torchtitan.no-checkpoint-interval"]
    assert found(check(written(tmp_path, "b.toml", text.format("false")))) == []


def test_a_fork_with_several_flags_of_its_own_may_have_other_fp8_kernels(tmp_path: Path) -> None:
    fp8 = "--fp8-format hybrid --fp8-recipe tensorwise --ffn-hidden-size 8200"
    assert found(script(tmp_path, fp8)) == ["precision.fp8-widths"]
    own = "--quantized-comm --own-kernels --intra-node-experts --bind-cores 4 --trace-kernels"
    result = script(tmp_path, f"{fp8} {own}")
    assert found(result) == []
    assert "precision.fp8-widths" in found(result, "warning")


def test_experts_of_deepspeed_are_split_without_sequence_parallelism(tmp_path: Path) -> None:
    flags = OLD_FLAGS.replace("--pipeline-model-parallel-size 72", "--tensor-model-parallel-size 8 --num-experts 8")
    flags += " --moe-expert-parallel-size 8 --no-pipeline-parallel"
    assert "sequence_parallel.required-by-moe" not in found(deepspeed(tmp_path, flags))


def test_deepspeeds_pipeline_balances_its_layers(tmp_path: Path) -> None:
    flags = OLD_FLAGS.replace("--pipeline-model-parallel-size 72", "--pipeline-model-parallel-size 4")
    assert "pipeline.even-split" not in found(deepspeed(tmp_path, flags))
    without = written(tmp_path, "m.sh", f"torchrun --nnodes 9 --nproc-per-node 8 pretrain_gpt.py {flags}\n")
    assert "pipeline.even-split" in found(check(without))


def test_only_a_pipeline_takes_its_micro_batches_by_the_config(tmp_path: Path) -> None:
    flags = OLD_FLAGS.replace("--pipeline-model-parallel-size 72", "").replace("-batch-size 1 ", "-batch-size 2 ")
    assert "megatron-deepspeed.batch-sizes" in found(deepspeed(tmp_path, flags))
    result = deepspeed(tmp_path, f"{flags} --no-pipeline-parallel")
    assert "megatron-deepspeed.batch-sizes" in found(result, "warning")


INNER = """SIZES=${EXTRA}
if [[ -n "$KIND" ]]; then SIZES=',"data_types": {"grad_accum_dtype": "'$KIND'"}'; fi
cat <<EOF > ds.json
{"train_micro_batch_size_per_gpu": 1, "train_batch_size": 512, "bf16": {"enabled": true}$SIZES}
EOF
CMD="python3 -u pretrain_gpt.py --deepspeed --deepspeed_config ds.json FLAGS"
deepspeed --num_nodes 2 --num_gpus 8 --no_local_rank --no_python /usr/bin/bash -c "$CMD"
"""


def test_a_launcher_without_python_starts_a_shell(tmp_path: Path) -> None:
    flags = OLD_FLAGS.replace("size 72", "size 2").replace("--num-layers 70 --hidden-size 14336", "SIZES")
    flags = flags.replace("SIZES", "--num-layers 16 --hidden-size 3584 --tensor-model-parallel-size 4")
    result = check(written(tmp_path, "d.sh", INNER.replace("FLAGS", flags)))
    assert found(result) == []
    assert (result.framework, result.recipe.layout.tp) == ("megatron-deepspeed", 4)
    assert "16 GPUs" in " ".join(result.notes)
    parallel = INNER.replace("FLAGS", f"{flags} --sequence-parallel")
    assert found(check(written(tmp_path, "s.sh", parallel))) == ["megatron-deepspeed.max-connections"]
    assert found(check(written(tmp_path, "h.sh", f"export PT_HPU_LAZY_MODE=0\n{parallel}"))) == []


def test_a_trainer_beside_torchtitan_reads_its_config_file(tmp_path: Path) -> None:
    config = written(tmp_path, "c.toml", TITAN.replace('converters = ["float8"]\n', "").replace("[[opti", "# [[opti"))
    run = f'torchrun --nproc-per-node 8 -m slowstart.train --job.config_file={config} --job.description="\\"a run\\""\n'
    result = check(written(tmp_path, "r.sh", run))
    assert (result.framework, result.recipe.data.seq_length) == ("torchtitan", 4096)
    assert "launch.literal-quotes" in found(result, "warning")
    with pytest.raises(InputError, match="trains nothing"):
        check(written(tmp_path, "e.sh", run.replace("slowstart.train", "scripts.estimate.estimation")))


def test_megatrons_layers_are_recomputed_beside_zero_3(tmp_path: Path) -> None:
    flags = OLD_FLAGS.replace("--pipeline-model-parallel-size 72", "--tensor-model-parallel-size 8 --zero-stage 3")
    flags = flags.replace("--checkpoint-activations", "--no-pipeline-parallel --recompute-granularity selective")
    run = f"deepspeed --num_nodes 8 --num_gpus 8 pretrain_gpt.py --deepspeed --deepspeed_config ds.json {flags}"
    config = DEEP.replace('"stage": 0', '"stage": 3').replace(
        '"bf16"', '"optimizer": {"params": {"lr": "auto"}}, "bf16"'
    )
    result = check(written(tmp_path, "z.sh", f"{config}{run}\n"))
    assert found(result) == []
    assert result.engine == "deepspeed"


def test_experts_of_deepspeed_have_biases(tmp_path: Path) -> None:
    flags = OLD_FLAGS.replace("--pipeline-model-parallel-size 72", "--tensor-model-parallel-size 8 --num-experts 8")
    flags += " --moe-expert-parallel-size 8 --no-pipeline-parallel --enable-expert-tensor-parallelism"
    assert "moe.expert-bias" not in found(deepspeed(tmp_path, flags))


def test_a_split_without_training_samples(tmp_path: Path) -> None:
    assert found(script(tmp_path, "--split 0,0,0")) == ["megatron-lm.empty-split"]
    assert found(script(tmp_path, "--split 98,2,0")) == []


def test_a_program_without_text_has_a_vocabulary_of_zero(tmp_path: Path) -> None:
    flags = "--tokenizer-type NullTokenizer --vocab-size 0"
    assert found(script(tmp_path, flags)) == []
    assert found(script(tmp_path, flags.replace("0", "-5"))) == ["value.invalid"]


def test_a_required_flag_that_only_the_scripts_arguments_may_have(tmp_path: Path) -> None:
    text = f"{TRAIN.replace('PROGRAM', 'pretrain_gpt.py $@')}\n"
    assert found(check(written(tmp_path, "a.sh", text)), "warning") == []
    without = check(written(tmp_path, "b.sh", text.replace("--num-attention-heads 8", "")))
    assert (found(without), found(without, "warning")) == ([], ["megatron-lm.missing"])
    several = check(written(tmp_path, "c.sh", text.replace("--num-attention-heads 8", "$(sizes)")))
    assert "megatron-lm.missing" not in found(several, "warning")


def test_any_attention_is_split_by_deepspeeds_sequence_parallelism(tmp_path: Path) -> None:
    flags = OLD_FLAGS.replace("--pipeline-model-parallel-size 72", "--ds-sequence-parallel-size 4")
    result = deepspeed(tmp_path, f"{flags} --no-pipeline-parallel")
    assert "sequence.attention-kernel" not in found(result)
    assert result.recipe.layout.cp == 4


def test_host_memory_of_unknown_machines_is_no_error(tmp_path: Path) -> None:
    flags = OLD_FLAGS.replace("--pipeline-model-parallel-size 72", "--cpu-optimizer --no-pipeline-parallel")
    flags = flags.replace("--num-layers 70 --hidden-size 14336", "--num-layers 24 --hidden-size 8192")
    config = DEEP.replace('"stage": 0', '"stage": 3, "offload_optimizer": {"device": "cpu"}')
    start = "deepspeed --num_nodes 1 --num_gpus 1 pretrain_gpt.py --deepspeed --deepspeed_config ds.json"
    run = f"{start} {flags} --zero-stage 3\n"
    path = written(tmp_path, "h.sh", f"{config}{run}".replace("112", "64"))
    assert "memory.host" in found(check(path), "warning")
    assert "memory.host" in found(check(path, gpus="1xH100"))
