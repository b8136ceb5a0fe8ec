"""torchtitan: findings in its configs and commands, and recipes exported and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.frameworks.cases import Case, changed, draws, found, replaced, unmapped

from meshwright import frameworks
from meshwright.clusters import cluster
from meshwright.errors import InputError
from meshwright.frameworks.framework import RuleContext
from meshwright.frameworks.to_recipe import complete, import_recipe
from meshwright.frameworks.torchtitan.models import FLAVORS, PRESETS, flavor_model, flavor_of, preset_model
from meshwright.models import find
from meshwright.recipes import index, pretrain
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.wsd_keys import decay_end, decay_length

DENSE = """\
[job]
dump_folder = "./runs/8b"
description = "eight billion"

[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
converters = []

[optimizer]
name = "AdamW"
lr = 3e-4

[lr_scheduler]
warmup_steps = 100
decay_type = "cosine"
min_lr_factor = 0.1

[training]
local_batch_size = 1
global_batch_size = 64
seq_len = 8192
steps = 2000
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
context_parallel_degree = 1

[checkpoint]
enable = true
interval = 500
keep_latest_k = 4

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[compile]
enable = true
components = ["model", "loss"]

[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
filter_fqns = ["output"]
"""
STAGED = replaced(
    DENSE,
    ("local_batch_size = 1\nglobal_batch_size = 64", "local_batch_size = 16\nglobal_batch_size = 64"),
    ("data_parallel_shard_degree = -1", "data_parallel_shard_degree = 4\npipeline_parallel_degree = 2"),
    ("context_parallel_degree = 1", 'pipeline_parallel_schedule = "interleaved1F1B"'),
)
EXPERTS = replaced(
    DENSE,
    ('name = "llama3"\nflavor = "8B"', 'name = "deepseek_v3"\nflavor = "16B"'),
    ("Llama-3.1-8B", "deepseek-moe-16b-base"),
    ("seq_len = 8192", "seq_len = 4096"),
    ("context_parallel_degree = 1", "expert_parallel_degree = 8\nexpert_tensor_parallel_degree = 1"),
    ('components = ["model", "loss"]', 'components = ["loss"]'),
)
FLOAT8 = replaced(DENSE, ("converters = []", 'converters = ["quantize.linear.float8"]'))
ON = "2x8xH100"
FILES = (
    Case("valid", DENSE, gpus=ON),
    Case("valid without GPUs", DENSE),
    Case("valid pipeline", STAGED, gpus="8xH200"),
    Case("valid experts", EXPERTS, gpus="2x8xH200"),
    Case("valid float8", replaced(FLOAT8, ("all_gather = false", "all_gather = true")), gpus=ON),
    Case("valid, default batch", replaced(DENSE, ("global_batch_size = 64", "global_batch_size = -1")), gpus=ON),
    Case(
        "valid, every second layer recomputed",
        replaced(DENSE, ('selective_ac_option = "op"', 'selective_ac_option = "2"')),
        gpus=ON,
    ),
    Case(
        "valid, sections of a config module of one's own",
        replaced(DENSE, ('"./runs/8b"', '"./runs/8b"\ncustom_config_module = "mine.config"')) + "\n[mine]\nx = 1\n",
        gpus=ON,
    ),
    Case("valid replicas", replaced(DENSE, ("replicate_degree = 1", "replicate_degree = 2")), gpus=ON),
    Case("unknown key", replaced(DENSE, ("seq_len = 8192", "seq_length = 8192")), [("key.unknown", 23)], ON),
    Case("no validation steps", DENSE + "\n[validation]\nsteps = 0\n", [("torchtitan.validation-steps", 51)], ON),
    Case("valid, all validation steps", DENSE + "\n[validation]\nsteps = -1\n", gpus=ON),
    Case("unknown section", DENSE + "\n[trainer]\nfast = true\n", [("key.unknown", 51)], ON),
    Case("removed key", replaced(DENSE, ("seq_len", "compile = true\nseq_len")), [("key.removed", 23)], ON),
    Case(
        "key of today",
        replaced(DENSE, ("seq_len = 8192", "seq_len = 8192\nmax_context_length = 8192")),
        [("torchtitan.other-version", 24)],
        ON,
    ),
    Case("unknown model", replaced(DENSE, ('"llama3"', '"lama3"')), [("torchtitan.model-name", 6)], ON),
    Case("flavor in wrong case", replaced(DENSE, ('"8B"', '"8b"')), [("torchtitan.model-name", 7)], ON),
    Case("unknown dataset", replaced(DENSE, ('"c4"', '"pile"')), [("torchtitan.dataset-name", 25)], ON),
    Case("lower-case optimizer", replaced(DENSE, ("AdamW", "adamw")), [("torchtitan.optimizer-name", 12)], ON),
    Case("decay", replaced(DENSE, ('"cosine"', '"cosin"')), [("value.invalid", 17)], ON),
    Case("decay too long", replaced(DENSE, ('type = "cosine"', "ratio = 1.0")), [("torchtitan.decay-truncated", 17)]),
    Case("warm-up", replaced(DENSE, ("steps = 100", "steps = 3000")), [("learning_rate.warmup-too-long", 16)], ON),
    Case("product", replaced(DENSE, ("shard_degree = -1", "shard_degree = 12")), [("topology.shard-product", 29)], ON),
    Case("heads", replaced(DENSE, ("tensor_parallel_degree = 1", "tensor_parallel_degree = 16")),
         [("heads.kv-heads", 30), ("network.tensor-parallel-domain", 30)], "4x8xB200"),
    Case("batch", replaced(DENSE, ("global_batch_size = 64", "global_batch_size = 72")), [("batch.divides", 21)], ON),
    Case("recompute mode", replaced(DENSE, ('mode = "selective"', 'mode = "some"')), [("value.invalid", 39)], ON),
    Case("recompute option", replaced(DENSE, ('"op"', '"ops"')), [("torchtitan.recompute-option", 40)], ON),
    Case(
        "memory budget without compile",
        replaced(DENSE, ('"selective"', '"memory_budget"'), ("enable = true\ncomp", "enable = false\ncomp")),
        [("torchtitan.memory-budget", 39)],
        ON,
    ),
    Case("async TP without compile", replaced(
        DENSE,
        ("tensor_parallel_degree = 1", "tensor_parallel_degree = 2\nenable_async_tensor_parallel = true"),
        ('["model", "loss"]', '["loss"]'),
    ), [("overlap.async-tensor-parallel", 31)], ON),
    Case("old converter", replaced(DENSE, ("converters = []", 'converters = ["float8"]')), [("value.invalid", 9)], ON),
    Case(
        "float8 that nothing reads",
        replaced(DENSE, ("all_gather = false", "all_gather = true")),
        [("torchtitan.quantize-ignored", 47), ("torchtitan.quantize-ignored", 48)],
        ON,
    ),
    Case(
        "float8 by recipe with its own gather",
        replaced(FLOAT8, ("all_gather = false", 'all_gather = true\nrecipe_name = "rowwise"')),
        [("torchtitan.float8-gather", 47)],
        ON,
    ),
    Case("two converter formats", replaced(
        FLOAT8, ('"quantize.linear.float8"', '"quantize.linear.float8", "quantize.grouped_mm.mx"')
    ), [("torchtitan.converter-layout", 9)], "2x8xB200"),
    Case("MXFP8 with tensor parallelism and compile", replaced(
        DENSE, ("converters = []", 'converters = ["quantize.linear.mx"]'),
        ("\ntensor_parallel_degree = 1", "\ntensor_parallel_degree = 2"),
    ), [("torchtitan.converter-layout", 9)], "2x8xB200"),
    Case("float8 experts with context parallelism", replaced(
        EXPERTS, ("converters = []", 'converters = ["quantize.grouped_mm.float8"]'),
        ("expert_tensor_parallel_degree = 1", "context_parallel_degree = 2"),
    ), [("torchtitan.converter-layout", 9)], "4x8xB200"),
    Case("float8 emulated", FLOAT8 + "emulate = true\n", [("torchtitan.float8-emulation", 49)], ON),
    Case("one checkpoint", replaced(DENSE, ("keep_latest_k = 4", "keep_latest_k = 1")),
         [("torchtitan.one-checkpoint", 36)], ON),
    Case("one checkpoint, saving disabled", replaced(
        DENSE, ("keep_latest_k = 4", "keep_latest_k = 1"), ("enable = true\ninterval", "enable = false\ninterval")
    ), gpus=ON),
    Case("HF checkpoint with optimizer state", replaced(
        DENSE, ("keep_latest_k = 4", "last_save_in_hf = true\nlast_save_model_only = false")
    ), [("torchtitan.weights-only", 37)], ON),
    Case("early step", replaced(DENSE, ("lr = 3e-4", "lr = 3e-4\nearly_step_in_backward = true")),
         [("torchtitan.early-step-unclipped", 14)], ON),
    Case("early step with a pipeline", replaced(
        STAGED, ("lr = 3e-4", "lr = 3e-4\nearly_step_in_backward = true")
    ), [("torchtitan.early-step", 14)], "8xH200"),
    Case("schedule with our name", replaced(STAGED, ("interleaved1F1B", "interleaved_1f1b")),
         [("value.invalid", 32)], "8xH200"),
    Case("unknown schedule", replaced(STAGED, ("interleaved1F1B", "ZeroBubble")), [("value.invalid", 32)], "8xH200"),
    Case("stage chunks", replaced(
        STAGED, ("pipeline_parallel_degree = 2", "pipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 7")
    ), [("torchtitan.stage-count", 31)], "8xH200"),
    Case("global batch of a pipeline", replaced(STAGED, ("global_batch_size = 64", "global_batch_size = 96")),
         [("torchtitan.global-batch", 22)], "8xH200"),
    Case("micro batch", replaced(STAGED, ("seq_len = 8192", "seq_len = 8192"),
                                 ("degree = 2", "degree = 2\npipeline_parallel_microbatch_size = 3")),
         [("value.invalid", 21)], "8xH200"),
    Case("tied", replaced(STAGED, ('"llama3"\nflavor = "8B"', '"qwen3"\nflavor = "1.7B"')),
         [("torchtitan.no-pipeline", 30)], "8xH200"),
    Case("stage ends", replaced(
        STAGED,
        ("pipeline_parallel_degree = 2", "pipeline_parallel_degree = 2\npipeline_parallel_last_stage_less_layers = 12"),
    ), [("torchtitan.stage-ends", 31)], "8xH200"),
    Case("odd length", replaced(DENSE, ("seq_len = 8192", "seq_len = 8191")), [("torchtitan.sequence-parts", 23)], ON),
    Case("experts of a dense model", replaced(
        DENSE, ("context_parallel_degree = 1", "expert_parallel_degree = 2")
    ), [("torchtitan.experts-ignored", 31)], ON),
    Case("valid, experts sharded like dense layers", replaced(
        EXPERTS, ("expert_tensor_parallel_degree = 1", "expert_tensor_parallel_degree = 2"),
        ("\ntensor_parallel_degree = 1", "\ntensor_parallel_degree = 2"),
    ), gpus="4x8xH200"),
    Case("valid, experts over some tensor-parallel ranks", replaced(
        EXPERTS, ("expert_parallel_degree = 8\n", "expert_parallel_degree = 2\n"),
        ("\ntensor_parallel_degree = 1", "\ntensor_parallel_degree = 4"),
    ), gpus="4x8xH200"),
    Case("experts without sharding", replaced(
        EXPERTS, ("\ntensor_parallel_degree = 1", "\ntensor_parallel_degree = 8"),
    ), [("torchtitan.experts-unsharded", 31)], "8xB200"),
    Case("derived replicas with tensor parallelism", replaced(
        DENSE, ("replicate_degree = 1", "replicate_degree = 2"),
        ("\ntensor_parallel_degree = 1", "\ntensor_parallel_degree = 8"),
    ), [("torchtitan.ddp-with-other-axes", 28)], "2x8xB200"),
    Case("context parallelism of gpt_oss", replaced(
        DENSE, ('"llama3"\nflavor = "8B"', '"gpt_oss"\nflavor = "20b"'),
        ("context_parallel_degree = 1", "context_parallel_degree = 2"),
    ), [("torchtitan.context-attention", 31)], "2x8xH200"),
    Case("valid, unused load balancer", replaced(
        DENSE, ("context_parallel_degree = 1", 'context_parallel_load_balancer = "other"')
    ), gpus=ON),
    Case("load balancer without block masks", replaced(
        DENSE, ("context_parallel_degree = 1", 'context_parallel_degree = 2\ncontext_parallel_load_balancer = "ptrr"')
    ), [("torchtitan.load-balancer", 32)], ON),
    Case("schedule that ends early", replaced(DENSE, ("warmup_steps = 100", "warmup_steps = 100\ntotal_steps = 1000")),
         [("torchtitan.total-steps", 17), ("learning_rate.decay-ends-early", 18)], ON),
    Case("schedule within the warm-up", replaced(
        DENSE, ("warmup_steps = 100", "warmup_steps = 100\ntotal_steps = 50")
    ), [("torchtitan.total-steps", 17)], ON),
    Case("test data for a long training", replaced(
        DENSE, ("steps = 2000", "steps = 200000"), ('dataset = "c4"', 'dataset = "c4_test"')
    ), [("torchtitan.test-dataset", 25)], ON),
    Case("traces every few steps", replaced(DENSE, ("steps = 2000", "steps = 200000"))
         + "[profiling]\nenable_profiling = true\nprofile_freq = 10\n", [("torchtitan.profiled-often", 51)], ON),
    Case("valid, all layers recomputed", replaced(DENSE, ('"op"', '"0"')), gpus=ON),
    Case("float8 emulated on old GPUs", FLOAT8 + "emulate = true\n",
         [("torchtitan.float8-emulation", 49)], "2x8xA100"),
    Case("valid, float8 emulated on old GPUs, not compiled", replaced(
        FLOAT8, ("enable = true\ncomp", "enable = false\ncomp")) + "emulate = true\n", gpus="4x8xA100"),
    Case("varlen with context parallelism", replaced(
        DENSE, ('"8B"', '"8B_varlen"'), ("context_parallel_degree = 1", "context_parallel_degree = 2")
    ), [("torchtitan.context-attention", 31)], ON),
    Case("load balancer", replaced(DENSE, ("context_parallel_degree = 1", 'context_parallel_load_balancer = ""')),
         [("torchtitan.load-balancer", 31)], ON),
    Case("expert tensor parallelism", replaced(
        EXPERTS, ("expert_tensor_parallel_degree = 1", "expert_tensor_parallel_degree = 4"),
        ("\ntensor_parallel_degree = 1", "\ntensor_parallel_degree = 2"),
    ), [("torchtitan.expert-mesh", 32)], "4x8xH200"),
    Case("DeepEP without expert parallelism", replaced(
        EXPERTS,
        ("expert_parallel_degree = 8\nexpert_tensor_parallel_degree = 1", 'expert_parallel_comm_backend = "deepep"'),
    ), [("torchtitan.deepep", 31)], "4x8xH200"),
    Case("DualPipeV with recompute", replaced(
        EXPERTS,
        ("local_batch_size = 1", "local_batch_size = 8"),
        ("expert_tensor_parallel_degree = 1", 'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "DualPipeV"'),
    ), [("torchtitan.dualpipe-recompute", 33)], "2x8xH200"),
    Case("replicas with tensor parallelism", replaced(
        DENSE, ("replicate_degree = 1", "replicate_degree = 8"), ("shard_degree = -1", "shard_degree = 1"),
        ("\ntensor_parallel_degree = 1", "\ntensor_parallel_degree = 2"),
    ), [("torchtitan.ddp-with-other-axes", 28)], "2x8xB200"),
    Case("memory estimation", replaced(DENSE, ("enable = true\ncomp", "enable = true\ncomp"))
         + "\n[memory_estimation]\nenable = true\n", [("torchtitan.estimate", 51)], ON),
    Case("budget of another mode", replaced(DENSE, ('option = "op"', 'option = "op"\nmemory_budget = 0.3')),
         [("torchtitan.memory-budget-ignored", 41)], ON),
)  # fmt: skip


NOW = """\
#!/bin/bash
export NCCL_DEBUG=WARN
torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d -m torchtitan.train \\
  --module llama3 --config llama3_8b \\
  --training.steps 2000 \\
  --training.num-tokens-per-train-step=524288 \\
  --optimizer.param-groups.0.optimizer-kwargs.lr 1e-4 \\
  --checkpoint.enable --checkpoint.no-last-save-model-only \\
  --compile.enable \\
  activation-checkpoint:selective
"""
RELEASED = replaced(
    NOW, ("num-tokens-per-train-step=524288", "global-batch-size=64"),
    ("--compile.enable ", "--compile.enable --training.local_batch_size 2 "),
)  # fmt: skip
RUN_TRAIN = "MODULE=llama3 CONFIG=llama3_8b NGPU=8 ./run_train.sh --training.steps 2000\n"
COMMANDS = (
    Case("valid", NOW),
    Case("valid run_train.sh", RUN_TRAIN),
    Case("valid custom module", replaced(RUN_TRAIN, ("MODULE=llama3 ", "MODULE=mine.recipes "))),
    Case("valid with GPUs", NOW, gpus=ON),
    Case("valid 0.3.0", RELEASED, gpus=ON),
    Case("valid pipeline of 0.3.0", replaced(
        RELEASED, ("--training.steps 2000", "--parallelism.pipeline_parallel_degree 2 --training.disable_cuda_graphs"),
        ("local_batch_size 2", "local_batch_size 8 --parallelism.pipeline_parallel_schedule Interleaved1F1B"),
    ), gpus=ON),
    Case("batch of 0.3.0", replaced(RELEASED, ("=64", "=72")), [("batch.divides", 9)], ON),
    Case("micro batches of 0.3.0", replaced(
        RELEASED, ("--training.steps 2000", "--parallelism.pipeline_parallel_degree 2 --training.disable_cuda_graphs"),
        ("local_batch_size 2", "local_batch_size 8 --parallelism.pipeline_parallel_microbatch_size 3"),
    ), [("value.invalid", 9), ("schedule.no-interleaving", 0)], ON),
    Case("TOML since 0.3.0", replaced(NOW, ("--config llama3_8b", "--config llama3_8b --job.config_file 8b.toml")),
         [("torchtitan.toml-removed", 4)]),
    Case("TOML by variable", "CONFIG_FILE=8b.toml " + RUN_TRAIN, [("torchtitan.toml-removed", 1)]),
    Case("removed flag", replaced(NOW, ("training.steps 2000", "training.local_batch_size 2")),
         [("torchtitan.other-version", 5)]),
    Case("unknown flag", replaced(NOW, ("training.steps", "training.stepz")), [("key.unknown", 5)]),
    Case("unknown module", replaced(NOW, ("--module llama3 ", "--module llama4 ")), [("torchtitan.preset", 4)]),
    Case("config in wrong case", replaced(NOW, ("llama3_8b", "llama3_8B")), [("torchtitan.preset", 4)]),
    Case("no config", replaced(NOW, ("--config llama3_8b", "")), [("torchtitan.preset", 3)]),
    Case("stray argument", replaced(NOW, ("--compile.enable", "--compile.enable fast")), [("value.invalid", 9)]),
    Case("CUDA graphs in a pipeline", replaced(
        NOW,
        ("--training.steps 2000", "--parallelism.pipeline_parallel_degree 2 --parallelism.num_pp_microbatches 8"),
        ("=524288", "=1048576"),
    ), [("graphs.pipeline", 4), ("schedule.no-interleaving", 0)]),
    Case("context parallelism without its backend", replaced(
        NOW,
        ("--training.steps 2000", "--parallelism.context_parallel_degree 2 --parallelism.spmd_backend full_dtensor"),
    ), [("torchtitan.context-attention", 5)]),
    Case("unknown backend", replaced(NOW, ("--compile.enable", "--parallelism.spmd_backend dtensor")),
         [("value.invalid", 9)]),
    Case("one checkpoint, saved or not", replaced(NOW, ("--compile.enable", "--checkpoint.keep_latest_k 1")),
         [("torchtitan.one-checkpoint", 9)]),
    Case("HF checkpoint with optimizer state", replaced(NOW, ("--compile.enable", "--checkpoint.last_save_in_hf")),
         [("torchtitan.weights-only", 8)]),
    Case("relative load path", replaced(NOW, ("--compile.enable", "--checkpoint.initial_load_path ./weights")),
         [("torchtitan.relative-path", 9)]),
    Case("async TP without compile", replaced(NOW, ("--compile.enable", "--compile.enable_async_tensor_parallel")),
         [("torchtitan.async-tp-uncompiled", 9)]),
    Case("experts of a dense model", replaced(NOW, ("--compile.enable", "--parallelism.expert_parallel_degree 8")),
         [("torchtitan.experts-ignored", 9)]),
    Case("tokens per step", replaced(NOW, ("=524288", "=600000")), [("torchtitan.tokens-per-step", 6)], ON),
    Case("type checking", replaced(NOW, ("--compile.enable", "--debug.spmd_typechecking")),
         [("torchtitan.type-checking", 9)]),
    Case("batch invariance", replaced(NOW, ("--compile.enable", "--debug.batch_invariant")),
         [("torchtitan.batch-invariant", 9)]),
    Case("memory budget", replaced(NOW, ("--compile.enable \\\n  ", ""), (":selective", ":memory-budget")),
         [("torchtitan.memory-budget", 9)]),
    Case("tokens of a micro batch", replaced(
        NOW,
        ("--training.steps 2000",
         "--training.num_tokens_per_microbatch_per_dp_rank 8193 --parallelism.tensor_parallel_degree 2"),
        ("=524288", "=524352"),
    ), [("torchtitan.tokens-per-microbatch", 5)], ON),
    Case("positions", replaced(NOW, ("--training.steps 2000", (
        "--training.max_context_length 262144 --training.num_tokens_per_microbatch_per_dp_rank 262144 "
        "--parallelism.context_parallel_degree 16"
    )), ("=524288", "=524288")), [("torchtitan.context-too-long", 5)]),
    Case("positions of the RoPE table", replaced(
        RELEASED, ("--module llama3 --config llama3_8b", "--module deepseek_v3 --config deepseek_v3_16b"),
        ("--training.steps 2000", "--training.seq_len 32768"), ("local_batch_size 2", "local_batch_size 1"),
    ), [("torchtitan.context-too-long", 5)], "2x8xB200"),
    Case("CUDA graphs with expert parallelism", replaced(
        NOW, ("--module llama3 --config llama3_8b", "--module deepseek_v3 --config deepseek_v3_16b"),
        ("--compile.enable", "--training.no-disable-cuda-graphs"),
    ), [("graphs.syncing-dispatch", 0)]),
)  # fmt: skip


PATH = "8b.toml"
CASES = (*FILES, *(case._replace(name=f"command: {case.name}", path="run.sh") for case in COMMANDS))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_findings(case: Case) -> None:
    assert found(case, PATH, "torchtitan") == list(case.expected)


def test_02_command_overrides_the_file(tmp_path: Path) -> None:
    (tmp_path / "8b.toml").write_text(DENSE)
    script = tmp_path / "run.sh"
    script.write_text("CONFIG_FILE=8b.toml NGPU=8 ./run_train.sh \\\n  --parallelism.tensor_parallel_degree 3\n")
    content = frameworks.open_file(script)
    result = frameworks.check(frameworks.detect_framework(content), content)
    assert ("heads.attention", "run.sh", 2) in [(f.rule, Path(f.file).name, f.line) for f in result.findings]
    assert any("0.2" in note for note in result.notes)
    assert result.recipe.train.steps == 2000


def test_flags_are_checked_without_the_file() -> None:
    text = "torchrun -m torchtitan.train --job.config_file gone.toml --training.stepz 3\n"
    result = frameworks.check(frameworks.framework("torchtitan"), frameworks.content_of(text, "run.sh"))
    assert [(f.rule, f.line) for f in result.findings] == [("key.unknown", 1)]
    assert any("gone.toml was not found" in note for note in result.notes)


def test_missing_file_suppresses_findings_on_defaults() -> None:
    text = (
        "CONFIG_FILE=gone.toml ./run_train.sh --model.name=qwen3 --model.flavor=32B --training.steps=50"
        " --training.local_batch_size=1\n"
    )
    content = frameworks.content_of(text, "run.sh")
    assert frameworks.check(frameworks.framework("torchtitan"), content, gpus="8xH100").findings == ()
    content = frameworks.content_of(text.replace("\n", " --lr_scheduler.warmup_steps=60\n"), "run.sh")
    result = frameworks.check(frameworks.framework("torchtitan"), content, gpus="8xH100")
    assert [f.rule for f in result.findings] == ["learning_rate.warmup-too-long"]


def test_notes_name_the_version() -> None:
    for text, path, version in ((DENSE, "8b.toml", "0.2"), (NOW, "run.sh", "2026-08-21")):
        result = frameworks.check(frameworks.framework("torchtitan"), frameworks.content_of(text, path))
        assert any(version in note for note in result.notes)


def test_unset_global_batch_is_derived_from_the_gpus() -> None:
    text = replaced(DENSE, ("global_batch_size = 64\n", ""))
    for gpus, batch in (("16xH100", 16), ("64xH100", 64)):
        result = frameworks.check(frameworks.framework("torchtitan"), frameworks.content_of(text, "8b.toml"), gpus=gpus)
        assert result.recipe.train.global_batch_size == batch


def test_030_counts_samples_with_the_same_presets() -> None:
    text = "torchrun --nproc_per_node 8 --nnodes 2 -m torchtitan.train --module llama3 --config llama3_70b "
    content = frameworks.content_of(text + "--training.global_batch_size 64\n", "run.sh")
    result = frameworks.check(frameworks.framework("torchtitan"), content)
    recipe = result.recipe
    assert (recipe.layout.micro_batch_size, recipe.data.seq_length, recipe.train.global_batch_size) == (8, 8192, 64)
    assert any("0.3.0" in note for note in result.notes)


def test_preset_values_are_used() -> None:
    theirs = frameworks.framework("torchtitan")
    text = "torchrun --nproc_per_node 8 --nnodes 16 -m torchtitan.train --module llama3 --config llama3_405b\n"
    recipe = complete(import_recipe(theirs, frameworks.content_of(text, "run.sh")), cluster("16x8xH100"))
    layout = recipe.layout
    assert (layout.tp, layout.sp, layout.recompute, layout.micro_batch_size) == (8, True, "full", 2)
    assert (recipe.data.seq_length, recipe.train.steps, recipe.optimizer.lr) == (8192, 3000, 8e-5)
    assert (recipe.precision.matmul, recipe.kernels.compile, recipe.kernels.tp_comm_overlap) == (
        "fp8_tensor",
        True,
        True,
    )
    assert (recipe.schedule.warmup_steps, recipe.train.global_batch_size) == (600, 2 * 16)


def test_presets_with_unknown_values_are_unresolved() -> None:
    text = "MODULE=qwen3_5 CONFIG=qwen35_2b NGPU=8 ./run_train.sh\n"
    result = frameworks.check(frameworks.framework("torchtitan"), frameworks.content_of(text, "run.sh"))
    assert not result.findings
    assert {"training.steps", "training.max_context_length"} <= {one.key for one in result.unresolved}


def test_every_flavor_and_preset_has_a_model() -> None:
    for name, flavors in FLAVORS.items():
        for flavor, ours in flavors.items():
            model = flavor_model(name, flavor)
            assert model is not None or not ours
            if model is not None and name != "flux":
                assert flavor_of(model) == (name, flavor)
    for module, presets in PRESETS.items():
        for config, preset in presets.items():
            assert preset_model(module, config) is not None
            assert all(key in config_keys("torchtitan") for key in preset.settings)


def test_rules_use_known_keys_and_accept_an_empty_file() -> None:
    theirs = frameworks.framework("torchtitan")
    parsed = theirs.parse(frameworks.content_of("[parallelism]\n", "8b.toml", "toml"))
    look = RuleContext(
        theirs, parsed, import_recipe(theirs, frameworks.content_of("[parallelism]\n", "x.toml")).recipe, None, None
    )
    for rule in theirs.rules:
        assert rule.symptom
        assert rule.cause
        assert all(key in config_keys("torchtitan") for key in rule.keys), rule.id
        broken = rule.check(look)
        assert broken is None or not list(broken if not hasattr(broken, "message") else [broken]), rule.id


MODELS = ("llama31_8b", "llama31_70b", "qwen3_30b_a3b", "deepseek_v3", "gpt_oss_20b")
FIELDS = draws(
    layout__tp=st.sampled_from([1, 2, 4, 8]),
    layout__pp=st.sampled_from([1, 2, 4]),
    layout__cp=st.sampled_from([1, 2]),
    layout__dp_shard=st.sampled_from([-1, 4, 8]),
    layout__dp_replicate=st.sampled_from([1, 2]),
    layout__micro_batch_size=st.sampled_from([1, 2, 4]),
    layout__recompute=st.sampled_from(["none", "selective", "full"]),
    layout__reshard_after_forward=st.booleans(),
    layout__offload=st.sampled_from(["none", "params"]),
    train__steps=st.integers(10**4, 10**6),
    train__seed=st.integers(0, 2**31),
    train__eval_every=st.integers(0, 10**4),
    train__eval_steps=st.integers(1, 99),
    train__log_every=st.integers(1, 99),
    train__profile=st.booleans(),
    optimizer__lr=st.floats(1e-6, 1),
    optimizer__beta1=st.floats(0, 0.999),
    optimizer__beta2=st.floats(0, 0.999),
    optimizer__eps=st.floats(1e-12, 1e-3),
    optimizer__weight_decay=st.floats(0, 1),
    optimizer__clip_grad=st.floats(0, 10),
    schedule__name=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    schedule__warmup_steps=st.integers(0, 10**4),
    schedule__decay_steps=st.integers(0, 10**6),
    schedule__min_lr=st.floats(0, 1e-6),
    precision__compute=st.sampled_from(["bf16", "fp32"]),
    precision__matmul=st.sampled_from(["same", "fp8_tensor", "fp8_row", "mxfp8"]),
    kernels__compile=st.booleans(),
    kernels__tp_comm_overlap=st.booleans(),
    kernels__deterministic=st.booleans(),
    kernels__loss=st.sampled_from(["vocab_parallel", "plain"]),
    data__dataset=st.sampled_from(["c4", "c4_test", "/data/c4", './with "quotes"']),
    data__tokenizer=st.sampled_from(["", "/tokens", "./tests/assets/tokenizer"]),
    data__workers=st.integers(0, 9),
    checkpoint__save_every=st.integers(0, 10**4),
    checkpoint__keep=st.integers(2, 9),
    checkpoint__async_save=st.booleans(),
    checkpoint__export=st.sampled_from(["none", "consolidated"]),
    checkpoint__pretrained=st.sampled_from(["", "/weights"]),
    moe__dispatcher=st.sampled_from(["alltoall", "deepep"]),
    moe__force_balance=st.booleans(),
)
THERE = {
    "precision.grads": "fp32", "precision.reduce": "fp32", "moe.balancing": "bias", "moe.aux_loss": 0.0,
    "checkpoint.export": "none", "data.dataset": "c4", "layout.recompute_modules": (), "moe.dispatcher": "alltoall",
    "precision.matmul": "same", "layout.stage_layers": (), "train.mtp_loss": 0.0, "layout.vp": 1,
    "layout.pp_schedule": "1f1b", "layout.cp_comm": "ring", "kernels.loss": "vocab_parallel", "layout.ep": 1,
}  # fmt: skip
"""Fields with a fixed value in torchtitan, or not drawn here."""


@settings(max_examples=30)
@given(FIELDS, st.sampled_from(MODELS))
def test_exports_round_trip(values: dict[str, Any], model: str) -> None:
    lacking = {"layout.pp": 1} if model.startswith(("qwen3", "gpt_oss")) else {}
    lacking |= {"layout.cp": 1} if model.startswith("gpt_oss") else {}
    if not values.get("kernels.compile"):
        lacking["kernels.tp_comm_overlap"] = False
    recipe = changed(pretrain(model, 64, global_batch_size=1024), {**THERE, **values, **lacking})
    follows = {"layout.sp": recipe.layout.tp > 1}
    # A decay that takes all steps after the warmup has no stable phase: it is read as what it is, a linear schedule.
    rest = decay_end(recipe) - recipe.schedule.warmup_steps
    assume(recipe.schedule.name != "wsd" or decay_length(recipe) < rest)
    assert unmapped("torchtitan", changed(recipe, follows), model, "64xH100") == {}


@pytest.mark.parametrize(
    ("values", "model"),
    [
        ({"layout.pp": 4, "layout.vp": 2, "layout.pp_schedule": "interleaved_1f1b"}, "llama31_8b"),
        ({"layout.pp": 2, "layout.vp": 4, "layout.pp_schedule": "interleaved_1f1b"}, "llama31_8b"),
        ({"layout.pp": 4, "layout.embedding_as_layer": True, "layout.head_as_layer": True}, "llama31_405b"),
        ({"layout.pp": 4, "layout.stage_layers": (7, 9, 9, 7)}, "llama31_8b"),
        ({"layout.pp": 2, "layout.vp": 2, "layout.pp_schedule": "zbv"}, "llama31_8b"),
        ({"layout.cp": 4, "layout.cp_comm": "allgather"}, "llama31_8b"),
        ({"layout.strategy": "ddp"}, "qwen3_600m"),
        ({"layout.ep": 8}, "qwen3_30b_a3b"),
        ({"precision.master": "bf16", "precision.moments": "bf16", "precision.grads": "bf16"}, "llama31_8b"),
        ({"precision.matmul": "fp8_tensor", "precision.fp8_gather": True}, "llama31_8b"),
    ],
)
def test_composite_layouts_round_trip(values: dict[str, Any], model: str) -> None:
    recipe = changed(
        pretrain(model, 64, global_batch_size=1024), {**THERE, "layout.tp": 1, "layout.sp": False, **values}
    )
    assert unmapped("torchtitan", recipe, model, "64xH100") == {}


def test_flavors_that_no_version_has_are_not_written() -> None:
    assert set(FLAVORS["llama3"]) == {"debugmodel", "8B", "70B", "405B"}  # of v0.2.2
    with pytest.raises(InputError, match="its llama3 does not tie the embeddings"):
        frameworks.export(
            frameworks.framework("torchtitan"), pretrain("llama32_1b", 8), find("llama32_1b"), cluster("8xH100")
        )


HAS_NO_WORDS = {
    "checkpoint.export", "data.dataset", "precision.reduce", "precision.grads", "precision.moments", "train.check_nan",
    "moe.balancing", "moe.dispatcher", "moe.ep_overlap", "moe.shared_expert_overlap", "moe.aux_loss", "train.mtp_loss",
    "kernels.te_rng_tracker", "kernels.cuda_graphs", "kernels.cuda_graph_scope", "kernels.loss", "layout.sp",
    "precision.matmul", "precision.fp8_gather", "precision.first_last_bf16", "layout.recompute_modules",
    "layout.cp_comm", "layout.offload", "kernels.overlap_grad_reduce", "kernels.overlap_param_gather",
    "kernels.tp_comm_overlap",
    "layout.strategy", "layout.recompute_layers", "layout.defer_grad_sync", "checkpoint.save_every", "moe.router_dtype",
    "moe.capacity_factor", "layout.vp", "layout.pp_schedule", "data.packing", "layout.cp_inner", "moe.grouped_gemm",
}  # fmt: skip


def test_shipped_recipes_lose_only_the_listed_fields() -> None:
    theirs = frameworks.framework("torchtitan")
    written_ones = 0
    for name in list(index.names())[::10]:
        recipe = index.load(name)
        try:
            written = frameworks.export(theirs, recipe, find(recipe.model), cluster(recipe.cluster))
        except InputError:
            continue
        written_ones += 1
        lost = {one.field for one in written.unmapped}
        assert lost <= HAS_NO_WORDS, (name, lost - HAS_NO_WORDS)
    assert written_ones > 15


def test_exports_have_no_findings() -> None:
    theirs = frameworks.framework("torchtitan")
    recipe = changed(pretrain("llama31_8b", 16, global_batch_size=64), {**THERE, "layout.tp": 1, "layout.sp": False})
    written = frameworks.export(theirs, recipe, find("llama31_8b"), cluster("2x8xH100"))
    assert list(written.files) == ["config.toml", "run_0.3.0.sh", "run.sh"]
    for name, text in written.files.items():
        result = frameworks.check(theirs, frameworks.content_of(text, name), gpus="2x8xH100")
        assert not [f for f in result.findings if f.severity == "error"], (name, result.findings)
    assert written.files["config.toml"].startswith("# ")
    assert "meshwright export" in written.files["config.toml"]


def test_current_command_equals_the_toml() -> None:
    theirs, on = frameworks.framework("torchtitan"), cluster("8x8xH100")
    values = {**THERE, "layout.tp": 2, "layout.sp": True, "layout.pp": 2, "train.steps": 7000, "optimizer.beta2": 0.98}
    recipe = changed(pretrain("llama31_70b", 64, global_batch_size=256), values)
    written = frameworks.export(theirs, recipe, find("llama31_70b"), on)
    for name in ("run.sh", "run_0.3.0.sh"):
        now = complete(import_recipe(theirs, frameworks.content_of(written.files[name], name)), on)
        assert now.layout.tp == now.layout.pp == 2
        assert (now.train.steps, now.train.global_batch_size) == (7000, 256)
        assert (now.data.seq_length, now.layout.micro_batch_size) == (
            recipe.data.seq_length,
            recipe.layout.micro_batch_size,
        )
        assert now.optimizer == recipe.optimizer
        assert now.layout.recompute == recipe.layout.recompute


@pytest.mark.parametrize(
    ("model", "axis"), [("qwen3_30b_a3b", "layout.pp"), ("gpt_oss_20b", "layout.pp"), ("gpt_oss_20b", "layout.cp")]
)
def test_unsupported_axis_is_rejected_with_the_field(model: str, axis: str) -> None:
    recipe = changed(pretrain(model, 16, global_batch_size=64), {**THERE, "layout.sp": False, axis: 2})
    with pytest.raises(InputError, match=rf"{axis}=2: torchtitan 0.2 does not support"):
        frameworks.export(frameworks.framework("torchtitan"), recipe, find(model), cluster("2x8xH100"))


def test_overlap_without_compile_is_listed_as_lost() -> None:
    values = {**THERE, "layout.tp": 2, "layout.sp": True, "kernels.tp_comm_overlap": True, "kernels.compile": False}
    recipe = changed(pretrain("llama31_8b", 16, global_batch_size=64), values)
    written = frameworks.export(frameworks.framework("torchtitan"), recipe, find("llama31_8b"), cluster("2x8xH100"))
    assert "kernels.tp_comm_overlap" in {one.field for one in written.unmapped}
    assert "async_tensor" not in "".join(written.files.values())


@pytest.mark.parametrize(
    "name", ["llama3_8b_sft_config", "nemotron_3_nano_pretrain_config", "flux_12b_pretrain_config"]
)
def test_unsupported_recipes_are_rejected(name: str) -> None:
    recipe = index.load(name)
    with pytest.raises(InputError, match=r"pretrain|llama3"):
        frameworks.export(frameworks.framework("torchtitan"), recipe, find(recipe.model), cluster(recipe.cluster))
