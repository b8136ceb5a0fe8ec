"""Run Megatron-LM's own parser and checks; bash runs the scripts with a torchrun that only records its arguments.

Megatron-Core 0.17 and later ship megatron.training. GPUs and Transformer Engine are mocked: only their capability and
version are read. Needs, besides torch: triton, omegaconf, packaging, psutil.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import random
import re
import shlex
import subprocess
import sys
import typing
import warnings
from argparse import BooleanOptionalAction, Namespace, _StoreConstAction
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.against import MISSING, Config, ReferenceParser, Verdict

from meshwright.clusters import cluster
from meshwright.frameworks.megatron_lm.arguments import key_of

LAUNCHERS = ("torchrun", "python", "mpirun")
RECORDER = """#!/bin/bash
{ printf '%s\\0' "$@"; } > "$RECORD_DIR/words"
env -0 > "$RECORD_DIR/env"
"""
ENVIRONMENT = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_GRAPH_REGISTER",
          "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NVTE_CPU_OFFLOAD_V1", "CUBLAS_WORKSPACE_CONFIG")  # fmt: skip
TRANSFORMER_ENGINE = "2.19.0"
MOCK_VOCAB_SIZE = 128256
"""Vocabulary size assumed for tokenizers that are not installed."""

NEWER = """
apply_dsa_kernel_fusion ckpt_fully_parallel_load_replicate_local ckpt_fully_parallel_save_replicate_local csa_
cuda_graph_dynamic_microbatches dense_grouped_gemm dynamic_context_parallel enable_hyper_connections
fallback_to_eager_attn gdn_ head_wise_attn_gate kda_ log_moe_overload_factor log_per_layer_resource_usage mhc_
moe_hybridep_pad_variable_tokens moe_n_hash_layers moe_ncclep_use_symm_mem moe_use_grouped_tensor mrope_interleaved
use_fused_mhc cp_partition_mode dsa_indexer_weights_proj_output_dtype gated_attention_proj_granularity
linear_attention_type linear_cp_mode megatron_fsdp_version min_dynamic_context_parallel_size
mtp_loss_scaling_factor_decay muon_weight_decay num_residual_streams o_groups o_lora_rank pad_packed_seq_alignment
rotary_base_per_layer sequence_packing_scheduler thd_ batch_invariant_backend ckpt_drop_redundant_extra_state
ckpt_fully_parallel_load_per_rank_objects ckpt_pg_tensors_cache_ enable_mhc_connections gdp_ gtp_ moe_combine_bwd_dtype
moe_dispatch_fwd_dtype mtp_hsm muon_use_syrk no_save_tokenizer_assets otel_ output_logit_dtype persistent_save_interval
rl_durable_rollout_bank rl_max_inflight_requests rl_rollout_bank_ use_gigatoken
"""

NOT_IN_WHEELS = """
enable_gloo_process_groups no_add_position_embedding no_moe_router_aux_loss_fusion no_use_gloo_process_groups
no_use_mamba_mem_eff_path use_flashinfer_fused_rope inference_wandb_logging_step_interval
original_max_position_embeddings retriever_seq_length tokenizer_library
"""


def evaluate(config: Config, folder: Path) -> Verdict:
    """Parse and validate arguments, then build the model config, micro batches and process groups."""
    if '"$@"' in config.text or "source " in config.text:
        return Verdict(None, "some arguments come from outside the file")
    argv, env = record(config, folder)
    if argv is None:
        return Verdict(None, "the script starts no program that can be recorded, or a tool that does not train")
    world = config.world or 8
    env = {**env, "WORLD_SIZE": str(world), "RANK": "0"}
    printed = io.StringIO()
    try:
        with _machine(config), mock.patch.dict(os.environ, env), _silence(printed):
            _start(argv, world)
    except SystemExit:
        return Verdict(False, printed.getvalue().strip().splitlines()[-1][-300:])
    except Exception as error:  # any exception is what a user would see
        return Verdict(False, f"{type(error).__name__}: {error}"[:300])
    return Verdict(True)


def record(config: Config, folder: Path) -> tuple[list[str] | None, dict[str, str]]:
    """Return the program's arguments and environment as bash passes them."""
    if config.text.startswith("--"):
        return shlex.split(config.text), {}
    for name in LAUNCHERS:
        recorder = folder / "bin" / name
        recorder.parent.mkdir(exist_ok=True)
        recorder.write_text(RECORDER)
        recorder.chmod(0o755)
    env = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "RECORD_DIR": str(folder), "PRETRAINED_CHECKPOINT": "weights"}
    env |= {"NODE_RANK": "0", "HEAD_NODE": "localhost"}  # exports for several nodes need them
    subprocess.run(["bash", config.path], cwd=folder, env=env, capture_output=True, timeout=20, check=False)
    if not (folder / "words").exists():
        return None, {}
    argv = (folder / "words").read_text().split("\0")[:-1]
    pairs = dict(part.partition("=")[::2] for part in (folder / "env").read_text().split("\0") if part)
    given = dict(word.partition("=")[::2] for word in argv if word.startswith(ENVIRONMENT))
    at = next((index for index, word in enumerate(argv) if re.search(r"pretrain_\w+\.py$", word)), None)
    if at is None:
        return None, {}
    return argv[at + 1 :], {name: value for name, value in {**pairs, **given}.items() if name in ENVIRONMENT}


@contextlib.contextmanager
def _machine(config: Config) -> Iterator[None]:
    """Mock the GPUs of the case and a recent Transformer Engine."""
    import torch
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils
    from packaging.version import Version

    _transformer_engine()
    capability = cluster(config.gpus).gpu.capability if config.gpus else 9.0
    major, minor = divmod(round(float(capability) * 10), 10)
    properties = SimpleNamespace(major=major, minor=minor)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(major, minor)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(utils, "_te_version", Version(TRANSFORMER_ENGINE)),
        mock.patch.object(rope_utils, "fused_apply_rotary_pos_emb", object()),
        mock.patch.object(rope_utils, "fused_apply_rotary_pos_emb_thd", object()),
    ):
        yield


@functools.cache
def _transformer_engine() -> None:
    """Mock the one class whose signature is inspected, after all other imports are done."""
    from megatron.training import training  # noqa: F401

    class FusedAdam:
        def __init__(
            self, master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: Any
        ) -> None: ...

    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    sys.modules.update(modules)


@contextlib.contextmanager
def _silence(printed: io.StringIO) -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _start(argv: Sequence[str], world: int) -> None:
    """Run the steps of pretrain_gpt.py that need no GPU."""
    from megatron.training import arguments

    with mock.patch.object(sys, "argv", ["pretrain_gpt.py", *argv]):
        args = arguments.parse_args()
    arguments.validate_args(args, {})
    _tokenizer(args)
    _model(args)
    _batches(args)
    _ranks(args, world)
    _optimizer(args)


def _tokenizer(args: Namespace) -> None:
    """Build the tokenizer if it needs no files."""
    from megatron.training import global_vars

    if args.tokenizer_type and args.tokenizer_type.startswith("Null"):
        global_vars.build_tokenizer(args)
    args.vocab_size = args.vocab_size or MOCK_VOCAB_SIZE


def _model(args: Namespace) -> None:
    from megatron.training import arguments

    arguments.core_transformer_config_from_args(args)


def _batches(args: Namespace) -> None:
    from megatron.core import num_microbatches_calculator as calculator

    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(
        args.rank, args.rampup_batch_size, args.global_batch_size, args.micro_batch_size, args.data_parallel_size, False
    )


def _ranks(args: Namespace, world: int) -> None:
    """Initialize the process groups with the fake backend."""
    import torch
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            hierarchical_context_parallel_sizes=args.hierarchical_context_parallel_sizes,
            expert_model_parallel_size=args.expert_model_parallel_size,
            num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
    finally:
        with contextlib.suppress(Exception):
            parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _optimizer(args: Namespace) -> None:
    """Build the optimizer config, and the schedule for an optimizer without parameters."""
    from megatron.training import training

    training.get_megatron_optimizer_config(args)
    with mock.patch.object(training, "get_args", return_value=args):
        training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))


BASE = (
    "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 1 --global-batch-size 64 --train-iters 1000 --lr 2e-4 --lr-warmup-iters 10 --bf16 "
    "--disable-bias-linear --mock-data --tokenizer-type NullTokenizer --vocab-size 32000"
)
DRAWS = (
    "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 8", "--tensor-model-parallel-size 3",
    "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 16",
    "--context-parallel-size 2", "--context-parallel-size 4", "--sequence-parallel", "--use-distributed-optimizer",
    "--num-layers-per-virtual-pipeline-stage 2", "--num-virtual-stages-per-pipeline-rank 2", "--overlap-grad-reduce",
    "--overlap-param-gather", "--num-experts 8 --moe-grouped-gemm --expert-model-parallel-size 4",
    "--num-experts 8 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1", "--expert-model-parallel-size 2",
    "--num-experts 6 --expert-model-parallel-size 4", "--moe-router-topk 1", "--group-query-attention",
    "--group-query-attention --num-query-groups 4", "--global-batch-size 24", "--micro-batch-size 4",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity selective", "--recompute-granularity selective --recompute-modules mlp layernorm",
    "--fp8-format hybrid --fp8-recipe delayed", "--fp8-format hybrid --fp8-recipe tensorwise", "--fp8-param-gather",
    "--first-last-layers-bf16", "--use-torch-fsdp2 --no-gradient-accumulation-fusion",
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor", "--tp-comm-overlap", "--optimizer sgd", "--lr-decay-style cosine",
    "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split", "--min-lr 1e-3",
    "--use-precision-aware-optimizer --exp-avg-dtype bf16", "--cuda-graph-impl local", "--calculate-per-token-loss",
    "--decoder-first-pipeline-num-layers 2", "--optimizer-cpu-offload", "--untie-embeddings-and-output-weights",
)  # fmt: skip
SEED, RANDOM_CONFIGS = 20261115, 300


def random_configs() -> Iterator[Config]:
    """Yield a small model on 16 GPUs with one to five extra flags."""
    rng = random.Random(SEED)
    for number in range(RANDOM_CONFIGS):
        flags = rng.sample(DRAWS, rng.randint(1, 5))
        only = rng.random() < 0.5
        env = "" if "--use-torch-fsdp2" in " ".join(flags) and only else "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
        text = f"{env}torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py {BASE} {' '.join(flags)}\n"
        yield Config(f"{number}: {' '.join(flags)}", "draw", "run.sh", text, gpus="2x8xH100", world=16)


def keys() -> Mapping[str, Any]:
    """Return every flag of the parser with its default."""
    from argparse import ArgumentParser

    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False, add_help=False))
    return dict(pair for action in parser._actions for pair in _flags(action))


def _flags(action: Any) -> Iterator[tuple[str, Any]]:
    default = getattr(action.default, "name", action.default)
    for flag in action.option_strings:
        key = key_of(flag)
        if isinstance(action, BooleanOptionalAction):
            yield key, default is False if key.startswith("no_") else default
        elif isinstance(action, _StoreConstAction):
            yield key, False
        else:
            yield key, MISSING if action.required else default


def prepare() -> None:
    """Python 3.11 lacks a decorator that Megatron-Core's newest versions import."""
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]


REFERENCE = ReferenceParser(
    framework="megatron-lm",
    needs="megatron-core==0.19.2",
    module="megatron.training.arguments",
    evaluate=evaluate,
    prepare=prepare,
    runs_code="parse_args, validate_args, the transformer config, micro batches and process groups",
    keys=keys,
    random_configs=random_configs,
    detected_later={
        "graphs.": "fails when the graph is captured",
        "sequence_parallel.required-by-moe": "raised by the first forward pass",
        "megatron-lm.async-format": "NotImplementedError at the first save",
        "megatron-lm.micro-batch-groups": "raised by the pipeline schedule",
        "megatron-lm.batch-schedule": "raised when the number of micro batches of the schedule is computed",
        "megatron-lm.no-data": "raised when the dataset is built",
        "megatron-lm.no-layer-spec": "raised when the model is built",
        "megatron-lm.graphs-of-unpadded-experts": "fails when the graph is captured",
        "megatron-lm.tokenizer-": "fails when the tokenizer is built",
    },
    not_config_errors={},
    other_defaults={
        "cp_comm_type": "a list with one entry",
        "cuda_graph_modules": "an empty list",
        "tokenizer_model": "None, the same as an empty name here",
        "moe_flex_dispatcher_backend": "read only with the flex dispatcher",
    },
    other_keys={
        "batch_size": "parsed, then rejected: reported as removed here",
        "checkpoint_activations": "parsed, then rejected: reported as removed here",
        "model_parallel_size": "parsed, then rejected: reported as removed here",
        "warmup": "parsed, then rejected: reported as removed here",
        "kitchen_": "only if its library is installed",
        **dict.fromkeys(
            NOT_IN_WHEELS.split(), "in no wheel from 0.17 to 0.19.2: older or newer, or only a config field"
        ),
        **dict.fromkeys(NEWER.split(), "in Megatron-Core 0.20.0, which has no wheel"),
    },
)
