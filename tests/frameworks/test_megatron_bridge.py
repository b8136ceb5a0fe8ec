"""Megatron-Bridge: findings in commands, Python files and saved configs, and export round trips."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frameworks.cases import Case, changed, draws, found, replaced, unmapped

from meshwright import frameworks
from meshwright.clusters import cluster
from meshwright.errors import InputError
from meshwright.frameworks.megatron_bridge import bridge_recipes, snippet
from meshwright.models import find
from meshwright.recipes import index
from meshwright.recipes.key_maps.pipeline_layout import parse_pipeline_layout

PATH = "run.sh"
PRETRAIN = """\
#!/bin/bash
GPUS=8
torchrun --nnodes=4 --nproc-per-node=$GPUS scripts/training/run_recipe.py \\
    --recipe llama3_8b_pretrain_config \\
    --dataset megatron-indexed \\
    -tp 2 -pp 1 \\
    dataset.data_path=/data/dclm_text_document \\
    model.context_parallel_size=2 \\
    model.sequence_parallel=true \\
    train.global_batch_size=512 \\
    tokenizer.tokenizer_type=HuggingFaceTokenizer \\
    tokenizer.tokenizer_model=meta-llama/Meta-Llama-3-8B
"""
EXPERTS = """\
torchrun --nnodes=2 --nproc-per-node=8 scripts/training/run_recipe.py \\
    --recipe qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config \\
    --dataset mock \\
    model.expert_model_parallel_size=8 \\
    model.virtual_pipeline_model_parallel_size=2 \\
    train.global_batch_size=256
"""
TUNE = """\
./scripts/training/train.sh \\
    --nodes 1 --gpus-per-node 8 \\
    --account a --partition p --container-image i \\
    --model llama3_8b --mode sft --dataset squad \\
    --pretrained_checkpoint /checkpoints/llama3-8b \\
    -gb 128 \\
    optimizer.lr=5e-6
"""
BENCHMARK = """\
torchrun --nnodes=2 --nproc-per-node=8 scripts/training/run_recipe.py \\
    --recipe qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config
"""
SNIPPET = """\
from megatron.bridge.recipes.llama import llama3_8b_sft_config as recipe
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step

GPUS = 4 * 8


def main() -> None:
    cfg = recipe()
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.sequence_parallel = True
    cfg.train.global_batch_size = GPUS * 4
    cfg.model.seq_length = cfg.dataset.seq_length = 4096
    cfg.checkpoint.pretrained_checkpoint = "/checkpoints/llama3-8b"
    finetune(cfg, forward_step)


if __name__ == "__main__":
    main()
"""
SAVED = """\
_target_: megatron.bridge.training.config.ConfigContainer
checkpoint:
  _target_: megatron.bridge.training.config.CheckpointConfig
  async_save: false
  ckpt_format: torch_dist
  load: /runs/a
  most_recent_k: -1
  save: /runs/a
  save_interval: 2000
dataset:
  _target_: megatron.bridge.training.config.GPTDatasetConfig
  blend: null
  num_workers: 8
  seq_length: 4096
  split: 9999,8,2
ddp:
  _target_: megatron.core.distributed.DistributedDataParallelConfig
  grad_reduce_in_fp32: true
  overlap_grad_reduce: true
  overlap_param_gather: true
  use_distributed_optimizer: true
  use_megatron_fsdp: false
mixed_precision:
  _target_: megatron.bridge.training.mixed_precision.MixedPrecisionConfig
  bf16: true
  fp16: false
  fp4: null
  fp8: null
  fp8_param_gather: false
  fp8_recipe: tensorwise
  grad_reduce_in_fp32: true
  params_dtype:
    _call_: false
    _target_: torch.bfloat16
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  attention_backend: null
  context_parallel_size: 1
  cuda_graph_impl: none
  cuda_graph_scope: full
  expert_model_parallel_size: 8
  expert_tensor_parallel_size: 1
  hf_model_id: Qwen/Qwen3-30B-A3B
  hidden_size: 2048
  kv_channels: 128
  moe_flex_dispatcher_backend: deepep
  moe_router_dtype: fp32
  moe_router_load_balancing_type: aux_loss
  moe_token_dispatcher_type: alltoall
  num_attention_heads: 32
  num_layers: 48
  pipeline_model_parallel_layout: null
  pipeline_model_parallel_size: 1
  recompute_granularity: selective
  recompute_method: null
  recompute_modules:
  - moe_act
  - mhc
  recompute_num_layers: null
  seq_length: 4096
  sequence_parallel: false
  tensor_model_parallel_size: 1
  virtual_pipeline_model_parallel_size: null
optimizer:
  _target_: megatron.bridge.training.config.OptimizerConfig
  exp_avg_dtype:
    _call_: false
    _target_: torch.float32
  lr: 0.0003
  min_lr: 3.0e-05
  optimizer: adam
  use_distributed_optimizer: true
peft: null
train:
  _target_: megatron.bridge.training.config.TrainingConfig
  eval_interval: null
  eval_iters: 0
  exit_signal:
    _args_:
    - 15
    _call_: true
    _name_: SIGTERM
    _target_: signal.Signals
  global_batch_size: 256
  micro_batch_size: 1
  train_iters: 5000
"""


def with_line(text: str, line: str) -> str:
    """Return a command with one more argument."""
    return text.rstrip("\n") + f" \\\n    {line}\n"


FSDP = "ddp.use_megatron_fsdp=true checkpoint.ckpt_format=fsdp_dtensor"
CASES = (
    Case("valid pretraining", PRETRAIN, gpus="4x8xH100"),
    Case("valid pretraining, GPUs from the launcher", PRETRAIN),
    Case("valid experts", EXPERTS, gpus="2x8xH200"),
    Case("valid fine-tuning through train.sh", TUNE, gpus="8xH100"),
    Case("valid benchmark", BENCHMARK),
    Case("valid benchmark on more GPUs", replaced(BENCHMARK, ("--nnodes=2", "--nnodes=4"))),
    Case("valid Python", SNIPPET, gpus="4x8xH100", path="override.py"),
    Case("valid saved config", SAVED, gpus="8xB200", path="run_config.yaml"),
    Case("env variables are not overrides", with_line(TUNE, "--custom_env_vars NCCL_DEBUG=INFO"), gpus="8xH100"),
    # the command
    Case(
        "length of the model only",
        with_line(PRETRAIN, "model.seq_length=32768"),
        [("megatron-bridge.length-replaced", 13)],
    ),
    Case("both lengths", with_line(PRETRAIN, "model.seq_length=8192 dataset.seq_length=8192")),
    Case("wrong section", with_line(PRETRAIN, "training.train_iters=10000"), [("key.unknown", 13)]),
    Case("dropped", with_line(PRETRAIN, "+model.foo=3"), [("megatron-bridge.dropped-key", 13)]),
    Case("typo", with_line(PRETRAIN, "model.recompute_granularty=full"), [("key.unknown", 13)]),
    Case("field of another section", with_line(PRETRAIN, "scheduler.min_lr=1e-5"), [("key.removed", 13)]),
    Case(
        "no such recipe",
        replaced(PRETRAIN, ("llama3_8b_pretrain_config", "qwen25_3b_pretrain_config")),
        [("megatron-bridge.unknown-recipe", 4)],
    ),
    Case(
        "a recipe that raises",
        replaced(TUNE, ("--model llama3_8b --mode sft", "--recipe qwen3_next_80b_a3b_peft_config")),
        [("megatron-bridge.unimplemented-recipe", 4)],
    ),
    Case("old data name", replaced(EXPERTS, ("mock", "llm-pretrain-mock")), [("value.invalid", 3)]),
    Case("no such data", replaced(EXPERTS, ("--dataset mock", "--dataset moc")), [("value.invalid", 3)]),
    Case("rejected flag", with_line(PRETRAIN, "--max-steps 100"), [("megatron-bridge.unknown-flag", 13)]),
    Case(
        "no such mode",
        replaced(TUNE, ("--model llama3_8b --mode sft", "--recipe llama3_8b_sft_config --mode finetune")),
        [("value.invalid", 4)],
        "8xH100",
    ),
    Case("a recipe and a model", with_line(TUNE, "--recipe llama3_8b_sft_config"), [
        ("megatron-bridge.recipe-or-model", 4)
    ], "8xH100"),
    Case("benchmark data", with_line(BENCHMARK, "--dataset mock"), [("megatron-bridge.benchmark-data", 3)]),
    Case(
        "mock data for fine-tuning",
        replaced(TUNE, ("--dataset squad", "--dataset mock")),
        [("megatron-bridge.dataset-goal-mismatch", 4)],
    ),
    Case(
        "no checkpoint",
        replaced(TUNE, ("    --pretrained_checkpoint /checkpoints/llama3-8b \\\n", "")),
        [("megatron-bridge.no-checkpoint", 4)],
    ),
    Case(
        "placeholder vocabulary",
        replaced(
            PRETRAIN,
            ("    tokenizer.tokenizer_type=HuggingFaceTokenizer \\\n", ""),
            (" \\\n    tokenizer.tokenizer_model=meta-llama/Meta-Llama-3-8B", ""),
        ),
        [("megatron-bridge.null-vocabulary", 4)],
    ),
    Case(
        "the name has another GPU count",
        replaced(
            EXPERTS,
            ("--nnodes=2 --nproc-per-node=8", "--nproc-per-node=4"),
            ("model.expert_model_parallel_size=8", "-tp 1 -pp 1 -ep 4 model.sequence_parallel=false"),
            ("model.virtual_pipeline_model_parallel_size=2", "model.recompute_modules=null"),
        ),
        [("megatron-bridge.gpu-count-mismatch", 2)],
        "4xB300",
    ),
    Case(
        "the layout needs more GPUs than in the name",
        replaced(
            with_line(EXPERTS, "-tp 8"),
            ("torchrun --nnodes=2 --nproc-per-node=8", "python"),
            ("    model.virtual_pipeline_model_parallel_size=2 \\\n", ""),
        ),
        [("topology.expert-mesh", 4), ("topology.world", 6)],
    ),
    Case(
        "a benchmark's batch does not scale",
        replaced(
            BENCHMARK,
            ("--nnodes=2 --nproc-per-node=8", "--nnodes=25 --nproc-per-node=4"),
            ("qwen3_30b_a3b_pretrain_16gpu_h100", "glm52_sft_192gpu_gb200"),
        ),
        [("topology.world", 0), ("megatron-bridge.batch-does-not-scale", 2)],
    ),
    # formats and sharding
    Case(
        "precision wins",
        with_line(PRETRAIN, "ddp.grad_reduce_in_fp32=false"),
        [("megatron-bridge.precision-overwrites", 13)],
    ),
    Case(
        "nothing inside a name",
        with_line(PRETRAIN, "mixed_precision.grad_reduce_in_fp32=true"),
        [("megatron-bridge.precision-preset-only", 13)],
    ),
    Case("no such precision", with_line(PRETRAIN, "mixed_precision=bf16_mixd"), [("value.invalid", 13)]),
    Case(
        "moments without their optimizer",
        with_line(PRETRAIN, "optimizer.exp_avg_dtype=bfloat16"),
        [("precision.bf16-moments", 13), ("megatron-bridge.precision-aware", 13)][1:],
    ),
    Case(
        "FSDP with other checkpoints",
        with_line(PRETRAIN, "ddp.use_megatron_fsdp=true"),
        [("megatron-bridge.fsdp-checkpoints", 13)],
    ),
    Case("FSDP with its checkpoints", with_line(PRETRAIN, FSDP)),
    Case(
        "FSDP with one connection",
        replaced(
            with_line(PRETRAIN, FSDP),
            ("GPUS=8\n", "GPUS=8\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\n"),
        ),
        [("megatron-bridge.fsdp-connections", 3)],
    ),
    Case(
        "background saves of another format",
        with_line(PRETRAIN, "checkpoint.async_save=true checkpoint.ckpt_format=torch"),
        [("megatron-bridge.async-format", 13)],
    ),
    # recompute, pipeline, experts, schedule
    Case(
        "half of full recompute",
        with_line(PRETRAIN, "model.recompute_granularity=full"),
        [("megatron-bridge.incomplete-recompute", 13)],
    ),
    Case(
        "selective recompute on top of full",
        with_line(EXPERTS, "model.recompute_granularity=selective"),
        [("megatron-bridge.incomplete-recompute", 7)],
        "2x8xH200",
    ),
    Case("chunks without stages", replaced(PRETRAIN, ("-pp 1", "-pp 1 -vp 2")), [("pipeline.chunks-need-stages", 6)]),
    Case(
        "two ways to split",
        with_line(EXPERTS, "'model.pipeline_model_parallel_layout=\"Et*11|(t*12|)*2t*13L\"' "
            "model.num_layers_in_first_pipeline_stage=11"),
        [("megatron-bridge.two-splits", 7)],
        "2x8xH200",
    ),
    Case(
        "a layout string for other stages",
        with_line(EXPERTS, "'model.pipeline_model_parallel_layout=\"Et*24|t*23L\"'"),
        [("pipeline.stage-count", 7), ("pipeline.stage-sum", 7)],
        "2x8xH200",
    ),
    Case(
        "experts over tensor ranks without sequence parallelism",
        with_line(EXPERTS, "model.sequence_parallel=false"),
        [("sequence_parallel.required-by-moe", 7)],
        "2x8xH200",
    ),
    Case(
        "a backend that nothing reads",
        with_line(EXPERTS, "model.moe_token_dispatcher_type=alltoall model.moe_flex_dispatcher_backend=hybridep"),
        [("megatron-bridge.unused-backend", 7)],
        "2x8xH200",
    ),
    Case(
        "a bias beside softmax scores",
        with_line(EXPERTS, "model.moe_router_enable_expert_bias=true"),
        [("megatron-bridge.bias-needs-sigmoid", 7), ("moe.bias-changes-scores", 7)],
        "2x8xH200",
    ),
    Case(
        "a bias beside sigmoid scores",
        with_line(EXPERTS, "model.moe_router_enable_expert_bias=true model.moe_router_score_function=sigmoid"),
        [("moe.bias-changes-scores", 7)],
        "2x8xH200",
    ),
    Case("batch", replaced(PRETRAIN, ("batch_size=512", "batch_size=500")), [("batch.divides", 0)]),
    Case(
        "two lengths of the run",
        with_line(PRETRAIN, "train.train_samples=1000000"),
        [("megatron-bridge.two-lengths", 13)],
    ),
    Case(
        "two warm-ups",
        with_line(PRETRAIN, "scheduler.lr_warmup_fraction=0.01"),
        [("megatron-bridge.schedule-units", 13)],
    ),
    Case("a truncated warm-up", with_line(PRETRAIN, "scheduler.lr_decay_iters=1000"), [
        ("megatron-bridge.warmup-capped", 13)
    ]),
    Case(
        "packed in two ways",
        with_line(TUNE, "dataset.enable_offline_packing=true dataset.enable_in_batch_packing=true"),
        [("megatron-bridge.packed-twice", 8)],
        "8xH100",
    ),
    Case(
        "older evaluation wins",
        with_line(PRETRAIN, "validation.eval_iters=10 train.eval_iters=2"),
        [("megatron-bridge.duplicate-evaluation", 13)],
    ),
    # Python
    Case(
        "Python: lengths that differ",
        replaced(SNIPPET, ("cfg.model.seq_length = cfg.dataset.seq_length = 4096", "cfg.model.seq_length = 8192")),
        [("megatron-bridge.length-replaced", 13)],
        "4x8xH100",
        path="override.py",
    ),
    Case(
        "Python: no such recipe",
        replaced(SNIPPET, ("llama3_8b_sft_config as recipe", "llama9_8b_sft_config as recipe")),
        [("megatron-bridge.unknown-recipe", 9)],
        path="override.py",
    ),
    Case(
        "Python: no such field",
        replaced(SNIPPET, ("cfg.train.global_batch_size", "cfg.train.batch_size")),
        [("key.unknown", 12)],
        "4x8xH100",
        path="override.py",
    ),
    # saved
    Case(
        "saved: both 8-bit and 4-bit",
        replaced(SAVED, ("  fp4: null\n  fp8: null", "  fp4: e2m1\n  fp8: hybrid")),
        [("megatron-bridge.two-formats", 27)],
        "16xB200",
        path="run_config.yaml",
    ),
    Case(
        "saved: experts do not divide",
        replaced(
            SAVED,
            ("expert_model_parallel_size: 8", "expert_model_parallel_size: 6"),
            ("global_batch_size: 256", "global_batch_size: 240"),
        ),
        [("moe.experts-divide", 41)],
        "3x8xB200",
        path="run_config.yaml",
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_findings(case: Case) -> None:
    assert found(case, PATH, "megatron-bridge") == list(case.expected)


def check(text: str, path: str = PATH, gpus: str | None = None) -> frameworks.CheckResult:
    return frameworks.check(frameworks.framework("megatron-bridge"), frameworks.content_of(text, path), gpus=gpus)


def test_finding_has_line_and_fix_as_override() -> None:
    result = check(with_line(PRETRAIN, "model.seq_length=32768"))
    finding = result.findings[0]
    assert (finding.file, finding.line, finding.field) == ("run.sh", 13, "model.seq_length")
    assert finding.fix == ("dataset.seq_length=32768",)
    assert result.recipe.data.seq_length == 8192
    (unknown,) = check(replaced(PRETRAIN, ("llama3_8b_pretrain_config", "llama3_8b_pretrian_config"))).findings
    assert unknown.fix[0] == "--recipe llama3_8b_pretrain_config"


@pytest.mark.parametrize("name", [
    *(f"qwen2_{size}_{goal}_config" for size in ("14b", "32b") for goal in ("pretrain", "sft", "peft")),
    *(f"qwen25_3b_{goal}_config" for goal in ("pretrain", "sft", "peft")),
])  # fmt: skip
def test_unknown_recipe_names(name: str) -> None:
    assert bridge_recipes.find(name) is None
    (finding,) = check(f"torchrun --nproc-per-node=8 scripts/training/run_recipe.py --recipe {name}\n").findings
    assert finding.rule == "megatron-bridge.unknown-recipe"
    assert f"; it has {name.partition('_')[0]}_" in finding.message or "did you mean" in finding.message


def test_precedence_of_overrides_flags_and_recipe() -> None:
    text = "torchrun run_recipe.py --recipe llama3_8b_pretrain_config -ms 10 -tp 2 train.train_iters=20\n"
    recipe = check(text).recipe
    assert (recipe.train.steps, recipe.layout.tp, recipe.layout.cp) == (20, 2, 2)
    assert (recipe.data.seq_length, recipe.train.global_batch_size) == (8192, 512)


def test_gpus_from_launcher_else_from_name() -> None:
    name = "qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config"
    assert str(check(f"python scripts/training/run_recipe.py --recipe {name}\n").cluster) == "2x8xH100"
    started = f"torchrun --nnodes=4 --nproc-per-node=8 scripts/training/run_recipe.py --recipe {name}\n"
    assert str(check(started).cluster) == "4x8xH100"
    assert check(started).recipe.train.global_batch_size == 2 * 1024  # benchmarks keep their samples per GPU


ALIASED = """\
from megatron.bridge.recipes.qwen import qwen3_30b_a3b_pretrain_config as base
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.gpt_step import forward_step


def parallel(model, job, experts=2):
    model.expert_model_parallel_size = 4
    job.train.micro_batch_size = 2
    return job


def start(config):
    pretrain(config, forward_step)


def main():
    recipe = base()
    m, t = recipe.model, recipe.train
    recipe = parallel(m, job=recipe)
    t.global_batch_size = 1152
    same = recipe
    same.optimizer.lr, same.optimizer.min_lr = 3e-5, 3e-6
    for part in (m, recipe.dataset):
        part.seq_length = 8192
    m.context_parallel_size = cp = 2
    m.tensor_model_parallel_size = m.context_parallel_size
    m, recipe.train.train_iters = load()
    m.pipeline_model_parallel_size = 8  # of an unknown object
    start(recipe)


main()
"""


def test_settings_through_other_names_of_a_config_are_read() -> None:
    read = snippet.read(frameworks.content_of(ALIASED, "train.py")).settings
    expected = {
        "model.expert_model_parallel_size": 4,
        "train.micro_batch_size": 2,
        "train.global_batch_size": 1152,
        "optimizer.lr": 3e-5,
        "optimizer.min_lr": 3e-6,
        "model.seq_length": 8192,
        "dataset.seq_length": 8192,
        "model.context_parallel_size": 2,
        "model.tensor_model_parallel_size": 2,
    }
    assert {key: read[key].value for key in expected} == expected
    assert read["train.train_iters"].unresolved
    assert "model.pipeline_model_parallel_size" not in read


def test_nested_calls_and_loops_are_read_up_to_a_limit() -> None:
    calls = "".join(f"def f{n}(cfg):\n    f{n + 1}(cfg)\n    f{n + 1}(cfg)\n" for n in range(40))
    loops = "".join(f"{'    ' * n}for x{n} in (1, 2, 3, 4):\n" for n in range(12)) + "    " * 12 + "pass\n"
    for more in (f"{calls}cfg = llama3_8b_sft_config()\nf0(cfg)\n", loops):
        with pytest.raises(InputError, match="repeats too many statements"):
            snippet.read(frameworks.content_of(SNIPPET + more, "train.py"))


OTHER_OBJECTS = """import argparse
from megatron.bridge.recipes.qwen import qwen3_8b_sft_config
from megatron.core.transformer import TransformerConfig


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq-length", type=int, default=8192)
    args, rest = parser.parse_known_args()
    return args, rest


def encoder():
    cfg = TransformerConfig(num_layers=2)
    cfg.deterministic_mode = True
    return cfg


def train(cfg):
    args, rest = options()
    cfg.model.seq_length = args.seq_length


cfg = qwen3_8b_sft_config()
train(cfg)
"""


def test_parsed_options_and_objects_of_other_classes_are_no_configs() -> None:
    read = snippet.read(frameworks.content_of(OTHER_OBJECTS, "train.py")).settings
    assert read["model.seq_length"].value == 8192
    assert not read["model.seq_length"].unresolved
    assert "deterministic_mode" not in read


def test_runtime_values_are_unresolved() -> None:
    text = replaced(PRETRAIN, ("train.global_batch_size=512", "train.global_batch_size=$(nproc)"))
    result = check(text)
    assert [(one.key, one.line) for one in result.unresolved] == [("train.global_batch_size", 10)]
    snippet = replaced(SNIPPET, ("= GPUS * 4", "= count_gpus()"))
    assert [one.key for one in check(snippet, "override.py").unresolved] == ["train.global_batch_size"]
    inside = replaced(SNIPPET, ("    cfg.train.global", "    if GPUS > 8:\n        cfg.train.global"))
    assert [one.key for one in check(inside, "override.py").unresolved] == ["train.global_batch_size"]


def test_python_file_is_not_executed() -> None:
    text = "import megatron.bridge\nraise SystemExit(__import__('os').system('false'))\n" + SNIPPET
    assert check(text, "override.py").recipe.train.global_batch_size == 128


def test_command_built_at_run_time_is_rejected() -> None:
    text = 'eval "$(cat scripts/training/run_recipe.py.args)"\n'
    with pytest.raises(InputError, match="at run time"):
        check(text)


def test_older_launcher_builds_recipe_name() -> None:
    text = "python scripts/performance/setup_experiment.py -m llama -mr llama3_8b -ng 8 -g h100 -c bf16 --account a\n"
    result = check(text)
    assert result.recipe.name == "llama3_8b_pretrain_8gpu_h100_bf16_config"
    assert str(result.cluster) == "8xH100"


def test_every_bridge_recipe_is_valid() -> None:
    for name in bridge_recipes.names():
        row = bridge_recipes.find(name)
        assert row is not None
        assert row.goal in ("pretrain", "sft", "peft")
        recipe = row.recipe()
        assert recipe.goal == row.goal
        encoded = bridge_recipes.gpus_in_name(row.name)
        assert encoded is None or row.gpus == encoded[0]
    assert len(bridge_recipes.library()) > 290


@pytest.mark.parametrize(("text", "layers"), [
    ("Et*3|(tt|)*2tmL", (3, 2, 2, 1)),
    ("Et|tt|L", (1, 2, 0)),
    ("E(t*2|)*3tL", (2, 2, 2, 1)),
])  # fmt: skip
def test_pipeline_layout_strings_are_parsed(text: str, layers: tuple[int, ...]) -> None:
    assert parse_pipeline_layout(text, "key") == layers


@pytest.mark.parametrize("text", ["Ex|tL", "E(t|*3", "", "(((((", "t*9" * 50 + ")"])
def test_invalid_pipeline_layout_strings_are_rejected(text: str) -> None:
    with pytest.raises(InputError, match="not a pipeline layout"):
        parse_pipeline_layout(text, "key")


FIELDS = draws(
    layout__strategy=st.sampled_from(["zero1", "ddp", "megatron_fsdp"]),
    layout__tp=st.sampled_from([1, 2, 4, 8]),
    layout__pp=st.sampled_from([1, 2, 4]),
    layout__cp=st.sampled_from([1, 2]),
    layout__ep=st.sampled_from([1, 2, 8]),
    layout__etp=st.sampled_from([1, 2]),
    layout__dp_replicate=st.sampled_from([1, 2]),
    layout__micro_batch_size=st.sampled_from([1, 2]),
    layout__offload=st.sampled_from(["none", "optimizer", "activations"]),
    layout__cp_comm=st.sampled_from(["ring", "a2a", "allgather"]),
    layout__stage_layers=st.sampled_from([(), (3, 2, 2, 1)]),
    layout__recompute_modules=st.sampled_from([(), ("core_attn",), ("moe_act", "layernorm")]),
    data__seq_length=st.sampled_from([2048, 4096]),
    data__dataset=st.sampled_from(["squad", "gsm8k", "/data/a", "a b/c"]),
    data__tokenizer=st.sampled_from(["", "/tokenizer"]),
    data__pad_to_max_length=st.booleans(),
    train__global_batch_size=st.integers(1, 4096),
    train__steps=st.integers(1, 10**6),
    train__seed=st.integers(0, 2**31),
    train__log_every=st.integers(1, 100),
    train__check_nan=st.booleans(),
    optimizer__name=st.sampled_from(["adamw", "muon", "sgd", "lion"]),
    optimizer__lr=st.floats(1e-6, 1),
    optimizer__eps=st.floats(1e-12, 1e-3),
    optimizer__beta2=st.floats(0, 0.999),
    optimizer__clip_grad=st.floats(0, 10),
    schedule__name=st.sampled_from(["cosine", "linear", "wsd", "constant", "inverse_sqrt"]),
    schedule__warmup_steps=st.integers(0, 100),
    schedule__decay_steps=st.sampled_from([0, 1000]),
    schedule__min_lr=st.floats(0, 1e-6),
    precision__moments=st.sampled_from(["fp32", "bf16"]),
    precision__master=st.sampled_from(["fp32", "bf16"]),
    moe__balancing=st.sampled_from(["aux_loss", "seq_aux_loss", "none", "bias"]),
    moe__aux_loss=st.floats(0, 1),
    moe__router_z_loss=st.floats(0, 1),
    moe__capacity_factor=st.floats(0, 2),
    moe__router_dtype=st.sampled_from(["fp32", "bf16"]),
    moe__dispatcher=st.sampled_from(["alltoall", "allgather", "deepep", "hybridep"]),
    moe__grouped_gemm=st.booleans(),
    moe__shared_expert_overlap=st.booleans(),
    moe__ep_overlap=st.booleans(),
    kernels__attention=st.sampled_from(["auto", "flash", "cudnn", "eager", "sdpa"]),
    kernels__cuda_graphs=st.sampled_from(["none", "transformer_engine", "full_iteration"]),
    kernels__cuda_graph_scope=st.sampled_from([(), ("attn",), ("attn", "moe_router")]),
    kernels__te_rng_tracker=st.booleans(),
    kernels__overlap_grad_reduce=st.booleans(),
    kernels__tp_comm_overlap=st.booleans(),
    kernels__deterministic=st.booleans(),
    peft__rank=st.integers(1, 64),
    peft__alpha=st.floats(1, 64),
    peft__method=st.sampled_from(["lora", "dora"]),
    peft__targets=st.sampled_from([("qkv",), ("qkv", "proj", "fc1", "fc2")]),
    checkpoint__save_every=st.integers(0, 10**4),
    checkpoint__keep=st.integers(1, 9),
    checkpoint__async_save=st.booleans(),
)
TOGETHER = st.one_of(
    st.just({}),
    st.just({"layout.pp": 2, "layout.vp": 2, "layout.pp_schedule": "interleaved_1f1b"}),
    st.just({"layout.recompute": "full", "layout.recompute_layers": 3}),
    st.just({"layout.recompute": "selective"}),
    st.just({"layout.cp": 8, "layout.cp_comm": "a2a+ring", "layout.cp_inner": 4}),
    st.just({"train.eval_every": 50, "train.eval_steps": 3}),
    st.just({"precision.matmul": "mxfp8", "precision.fp8_gather": True}),
    st.just({"precision.matmul": "fp8_delayed", "precision.fp8_gather": True}),
    st.just({"checkpoint.pretrained": "/checkpoints/a"}),
)
STARTS = (
    "llama3_8b_pretrain_config", "llama3_8b_sft_config", "qwen3_8b_peft_config", "qwen3_30b_a3b_pretrain_config",
    "qwen3_30b_a3b_sft_config", "deepseek_v3_pretrain_config", "qwen25_3b_sft_config",
)  # fmt: skip
PLAIN = {"layout.strategy": "zero1", "layout.defer_grad_sync": True, "kernels.loss": "vocab_parallel"}
PLAIN |= {"precision.grads": "fp32", "precision.reduce": "fp32", "precision.moments": "fp32"}


@settings(max_examples=30)
@given(FIELDS, TOGETHER, st.sampled_from(STARTS))
def test_export_round_trip(values: dict[str, Any], more: dict[str, Any], name: str) -> None:
    base = index.load(name)
    if base.goal == "pretrain":
        values.pop("data.dataset", None)
    if name == "qwen25_3b_sft_config":  # a Python file: no presets of data
        values.pop("data.dataset", None)
    recipe = changed(base, {**PLAIN, **values, **more})
    fixed: dict[str, Any] = {"layout.sp": recipe.layout.tp > 1}
    if recipe.goal != "pretrain":
        fixed["train.per_token_loss"] = recipe.layout.cp > 1 or recipe.train.per_token_loss
    assert unmapped("megatron-bridge", changed(recipe, fixed), base.model, "8x8xH100") == {}


def test_shipped_recipes_lose_only_listed_fields() -> None:
    theirs = frameworks.framework("megatron-bridge")
    for name in index.names()[::10]:
        recipe = changed(index.load(name), {"layout.strategy": "zero1"})
        if index.family(name) in ("kempner", "sizes"):
            continue
        written = frameworks.export(theirs, recipe, find(recipe.model), cluster(recipe.cluster))
        lost = {one.field for one in written.unmapped}
        known = {"kernels.loss", "layout.defer_grad_sync", "precision.grads", "data.packing", "data.images"}
        known |= {"layout.offload"} if recipe.layout.recompute == "selective" else set()
        assert lost <= known | {"precision.fp8_gather", "precision.first_last_bf16", "layout.strategy"}, (name, lost)


def test_exported_config_has_no_findings() -> None:
    theirs = frameworks.framework("megatron-bridge")
    for name in (
        "llama3_8b_pretrain_config",
        "qwen3_30b_a3b_sft_config",
        "qwen25_3b_sft_config",
        "wan_1_3B_sft_config",
    ):
        recipe = changed(index.load(name), {"layout.strategy": "zero1"})
        written = frameworks.export(theirs, recipe, find(recipe.model), cluster(recipe.cluster))
        for path, text in written.files.items():
            rules = [finding.rule for finding in check(text, path, recipe.cluster).findings]
            assert not [rule for rule in rules if rule.startswith(("megatron-bridge", "key", "value"))], (path, rules)


def test_model_without_recipe_or_id_is_rejected() -> None:
    recipe = index.load("kempner_7b_1gpu_config")
    with pytest.raises(InputError, match="no Hugging Face id"):
        frameworks.export(frameworks.framework("megatron-bridge"), recipe, find(recipe.model), cluster("8xH100"))
