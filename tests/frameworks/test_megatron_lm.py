"""Megatron-LM: findings in launch scripts, and export round trips."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.frameworks.cases import Case, changed, draws, found, replaced, unmapped

from meshwright import frameworks, planner
from meshwright.clusters import cluster
from meshwright.errors import InputError
from meshwright.frameworks.megatron_lm.model import parse_pattern
from meshwright.models import find
from meshwright.recipes import index, pretrain, sft
from meshwright.recipes.key_maps.megatron_lm_composite_keys import LAYOUT_SYMBOLS
from meshwright.recipes.key_maps.pipeline_layout import format_pipeline_layout, parse_pipeline_layout
from meshwright.recipes.types import Recipe

PATH = "train.sh"
DENSE = """\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=2
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --seq-length 4096
    --max-position-embeddings 4096
    --vocab-size 128256
)
TRAINING_ARGS="
    --micro-batch-size 1
    --global-batch-size 512
    --train-iters 10000
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-iters 500
    --weight-decay 0.1
    --adam-beta2 0.95
    --bf16
"
PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size 1
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
RUN_ARGS=(
    --mock-data
    --tokenizer-type NullTokenizer
    --save runs/a
    --load runs/a
    --save-interval 500
    --attention-backend flash
)
torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py \\
    "${MODEL_ARGS[@]}" $TRAINING_ARGS \\
    "${PARALLEL_ARGS[@]}" "${RUN_ARGS[@]}"
"""
PIPELINED = replaced(
    DENSE,
    ("--pipeline-model-parallel-size 1", "--pipeline-model-parallel-size 4"),
    ("    --sequence-parallel\n", "    --sequence-parallel\n    --num-layers-per-virtual-pipeline-stage 2\n"),
)
EXPERTS = """\
torchrun --nproc_per_node=8 --nnodes=8 pretrain_gpt.py \\
  --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
  --group-query-attention --num-query-groups 8 --ffn-hidden-size 14336 \\
  --normalization RMSNorm --swiglu --disable-bias-linear \\
  --position-embedding-type rope --untie-embeddings-and-output-weights \\
  --seq-length 4096 --max-position-embeddings 4096 \\
  --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model \\
  --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 \\
  --moe-grouped-gemm --moe-token-dispatcher-type alltoall \\
  --expert-model-parallel-size 8 \\
  --pipeline-model-parallel-size 4 \\
  --num-virtual-stages-per-pipeline-rank 8 \\
  --micro-batch-size 1 --global-batch-size 256 --train-samples 1000000 \\
  --lr 1e-4 --min-lr 1e-5 --lr-warmup-samples 10000 --bf16 \\
  --use-distributed-optimizer --data-path 0.7 web 0.3 code --split 99,1,0
"""
BARE = """\
--num-layers 24 --hidden-size 2048
--num-attention-heads 16
--seq-length 2048 --max-position-embeddings 2048
--micro-batch-size 4 --global-batch-size 256
--train-iters 1000 --lr 2e-4 --lr-warmup-fraction 0.01
--bf16 --recompute-activations
--vocab-file vocab.json --merge-file merges.txt --data-path corpus_text_document
"""


def at(text: str, words: str) -> int:
    """Return the number of the one line that contains a text."""
    lines = [number for number, line in enumerate(text.splitlines(), 1) if words in line]
    assert len(lines) == 1, (words, lines)
    return lines[0]


def broken(
    name: str, text: str, old: str, new: str, rule: str, words: str | None = None, gpus: str | None = "2x8xH100"
) -> Case:
    """A script with one error and its one expected finding; without `words` the finding has line 0."""
    changed_text = replaced(text, (old, new))
    return Case(name, changed_text, [(rule, at(changed_text, words) if words else 0)], gpus)


def with_args(text: str, args: str, after: str = "--overlap-grad-reduce") -> tuple[str, str, str]:
    """Return a replacement that adds a line of arguments."""
    return text, after, f"{after}\n    {args}"


MOE_GPUS = "8x8xH100"
COMMON = (
    Case("valid: arrays and strings", DENSE, gpus="2x8xH100"),
    Case("valid: unknown GPU type", DENSE),
    Case("valid: virtual stages", PIPELINED, gpus="2x8xH100"),
    Case("valid: experts, samples and a blend", EXPERTS, gpus=MOE_GPUS),
    Case("valid: a bare list of arguments", BARE, gpus="8xH100", path="gpt.args"),
    Case("valid: Blackwell needs no single connection", replaced(DENSE, ("export CUDA_DEVICE_MAX_CONNECTIONS=1\n", "")),
         gpus="2x8xB200"),
    Case("valid: started by the older module", replaced(DENSE, ("torchrun", "python -m torch.distributed.launch")),
         gpus="2x8xH100"),
    Case("valid: a launcher passes the environment on", replaced(
        DENSE, ("export CUDA_DEVICE_MAX_CONNECTIONS=1\n", ""),
        ("torchrun --nnodes 2 --nproc-per-node 8", "mpirun -np 16 -x CUDA_DEVICE_MAX_CONNECTIONS=1 python")),
        gpus="2x8xH100"),
    Case("valid: a missing sourced file may set it", replaced(
        DENSE, ("export CUDA_DEVICE_MAX_CONNECTIONS=1\n", "source /cluster/env.sh\n")), gpus="2x8xH100"),
    Case("valid: arguments may come from outside", replaced(
        DENSE, ("    --micro-batch-size 1\n", ""), ('"${RUN_ARGS[@]}"', '"${RUN_ARGS[@]}" "$@"')), gpus="2x8xH100"),
    Case("valid: a tool that does not train", replaced(
        DENSE, ("    --train-iters 10000\n", ""), ("pretrain_gpt.py", "tools/report_theoretical_memory.py")),
        gpus="2x8xH100"),
    # Flags
    broken("unknown flag", *with_args(DENSE, "--overlap-params-gather"), "key.unknown", "--overlap-params-gather"),
    broken("underscores", DENSE, "--save-interval 500", "--save_interval 500", "key.unknown", "--save_interval"),
    broken("a flag of 2023", *with_args(DENSE, "--fp8-hybrid"), "key.removed", "--fp8-hybrid"),
    broken("a flag that never existed", *with_args(DENSE, "--cpu-optimizer"), "key.removed", "--cpu-optimizer"),
    broken("ignored flag", *with_args(DENSE, "--use-flash-attn"), "key.ignored", "--use-flash-attn"),
    broken("enabled by default", *with_args(DENSE, "--use-mcore-models"), "key.ignored", "--use-mcore-models"),
    broken("derived by Megatron-LM", *with_args(DENSE, "--virtual-pipeline-model-parallel-size 2"), "key.removed",
           "--virtual-pipeline"),
    broken("a field that has no flag", *with_args(DENSE, "--cpu-offloading"), "key.unknown", "--cpu-offloading"),
    broken("a flag of 0.17", *with_args(DENSE, "--no-scatter-gather-tensors-in-pipeline"), "key.removed",
           "--no-scatter-gather"),
    broken("a router's numbers", *with_args(DENSE, "--moe-router-dtype bf16"), "value.invalid", "--moe-router-dtype"),
    broken("a switch with a value", DENSE, "--swiglu", "--swiglu true", "value.stray", "--swiglu"),
    broken("no value", DENSE, "--weight-decay 0.1", "--weight-decay", "value.missing", "--weight-decay"),
    broken("not a number", DENSE, "--weight-decay 0.1", "--weight-decay ten", "value.invalid", "--weight-decay"),
    broken("not a choice", DENSE, "--lr-decay-style cosine", "--lr-decay-style cosin", "value.invalid", "cosin"),
    broken("flag given twice", DENSE, "--lr-warmup-iters 500", "--lr-warmup-iters 500 --lr-warmup-iters 600",
           "value.replaced", "--lr-warmup-iters"),
    # What must be there
    broken("no micro batch", DENSE, "    --micro-batch-size 1\n", "", "megatron-lm.missing"),
    Case("fine-tuning from random weights", replaced(DENSE, with_args(DENSE, "--sft")[1:]),
         [("learning_rate.fine-tuning", 24), ("megatron-lm.no-initial-weights", 38), ("data.mock-fine-tuning", 42)],
         "2x8xH100"),
    broken("no length", DENSE, "    --train-iters 10000\n", "", "megatron-lm.no-length"),
    broken("two lengths", *with_args(DENSE, "--train-samples 9"), "megatron-lm.iterations-and-samples",
           "--train-samples"),
    broken("no positions", DENSE, "--position-embedding-type rope", "--no-position-embedding",
           "megatron-lm.no-position-embedding", "--no-position-embedding"),
    broken("warm-up by samples", DENSE, "--lr-warmup-iters 500", "--lr-warmup-samples 5000",
           "megatron-lm.iterations-and-samples", "--lr-warmup-samples"),
    broken("two warm-ups", *with_args(DENSE, "--lr-warmup-fraction 0.1"), "megatron-lm.two-warm-ups",
           "--lr-warmup-fraction"),
    broken("all warm-up", DENSE, "--lr-warmup-iters 500", "--lr-warmup-iters 10000", "megatron-lm.warm-up-too-long",
           "--lr-warmup-iters"),
    broken("short warm-up", DENSE, "--lr-warmup-iters 500", "--lr-warmup-fraction 0.0001",
           "megatron-lm.warm-up-too-short", "--lr-warmup-fraction"),
    broken("no training samples", *with_args(DENSE, "--split 0,0,0"), "megatron-lm.empty-split", "--split 0,0,0"),
    broken("no interval", DENSE, "    --save-interval 500\n", "", "megatron-lm.save-without-interval", "--save runs"),
    broken("interval of zero", DENSE, "--save-interval 500", "--save-interval 0", "megatron-lm.no-save-interval",
           "--save-interval 0"),
    broken("no vocabulary", DENSE, "    --vocab-size 128256\n", "", "megatron-lm.null-tokenizer", "NullTokenizer"),
    broken("minimum above peak", DENSE, "--min-lr 3e-5", "--min-lr 3e-3", "learning_rate.minimum-above-peak",
           "--min-lr"),
    broken("two sources", *with_args(DENSE, "--data-path a"), "megatron-lm.two-sources", "--mock-data"),
    # The model
    broken("table too short", DENSE, "--max-position-embeddings 4096", "--max-position-embeddings 2048",
           "megatron-lm.position-embeddings", "--max-position-embeddings"),
    broken("heads do not divide", BARE, "--num-attention-heads 16", "--num-attention-heads 15",
           "megatron-lm.head-dim", "--num-attention-heads", None),
    broken("query groups ignored", DENSE, "    --group-query-attention\n", "", "megatron-lm.query-groups-ignored",
           "--num-query-groups"),
    Case("groups, heads and ranks", replaced(DENSE, ("--num-query-groups 8", "--num-query-groups 3")),
         [("heads.kv-groups", 3), ("megatron-lm.query-groups", 10)], "2x8xH100"),
    # The layout
    broken("one connection", DENSE, "export CUDA_DEVICE_MAX_CONNECTIONS=1\n", "", "megatron-lm.max-connections"),
    broken("several connections", DENSE, "CONNECTIONS=1", "CONNECTIONS=32", "megatron-lm.max-connections",
           "CONNECTIONS=32"),
    broken("sequence parallel alone", DENSE, "TP=2", "TP=1", "sequence_parallel.needs-tensor-parallel",
           "--sequence-parallel", "2x8xH200"),
    broken("virtual layers", PIPELINED, "pipeline-stage 2", "pipeline-stage 3", "megatron-lm.virtual-layers",
           "pipeline-stage 3"),
    broken("groups of micro batches", *with_args(PIPELINED, "--microbatch-group-size-per-virtual-pipeline-stage 3"),
           "megatron-lm.micro-batch-groups", "--microbatch-group"),
    broken("batch schedule and batch", *with_args(DENSE, "--step-batch-size-schedule '0:256 1B:512'"),
           "megatron-lm.batch-schedule", "--step-batch"),
    broken("batch schedule", DENSE, "--global-batch-size 512", "--step-batch-size-schedule 0:512,1B:700",
           "megatron-lm.batch-schedule", "--step-batch"),
    broken("no learning rate", DENSE, "    --lr 3e-4\n    --min-lr 3e-5\n", "", "megatron-lm.no-learning-rate"),
    broken("no data", DENSE, "    --mock-data\n", "", "megatron-lm.no-data"),
    broken("hybrid without a spec", *with_args(DENSE, f"--hybrid-layer-pattern {'*-' * 16}"),
           "megatron-lm.no-layer-spec", "--hybrid-layer"),
    broken("two interleavings", *with_args(PIPELINED, "--num-virtual-stages-per-pipeline-rank 4"),
           "megatron-lm.two-interleavings", "--num-layers-per-virtual"),
    broken("virtual stages without stages", *with_args(DENSE, "--num-virtual-stages-per-pipeline-rank 2"),
           "megatron-lm.virtual-stages-need-stages", "--num-virtual"),
    broken("two stages without overlap", replaced(PIPELINED, ("parallel-size 4", "parallel-size 2")),
           "--overlap-grad-reduce", "--overlap-grad-reduce --no-overlap-p2p-communication",
           "megatron-lm.virtual-stages-need-stages", "--num-layers-per-virtual"),
    broken("levels of context", DENSE, "    --sequence-parallel\n",
           "    --sequence-parallel --context-parallel-size 4 --cp-comm-type a2a+p2p\n", "megatron-lm.cp-hierarchy",
           "a2a+p2p"),
    broken("overlap without sequence parallel", DENSE, "--sequence-parallel", "--tp-comm-overlap",
           "megatron-lm.overlap-needs-sequence-parallel", "--tp-comm-overlap"),
    broken("more ranks than GPUs", PIPELINED, "parallel-size 4", "parallel-size 16", "topology.world", "TP=2"),
    broken("layers do not divide", DENSE, "parallel-size 1", "parallel-size 5", "pipeline.even-split",
           "pipeline-model-parallel-size", "5x8xH100"),
    broken("batch does not divide", DENSE, "--global-batch-size 512", "--global-batch-size 500", "batch.divides",
           "--micro-batch-size"),
    broken("gather without sharding", DENSE, "    --use-distributed-optimizer\n", "",
           "overlap.gather-needs-sharding", "--overlap-param-gather", "2x8xB200"),
    broken("gather without reduction", DENSE, "    --overlap-grad-reduce\n", "", "overlap.gather-needs-reduction",
           "--overlap-param-gather"),
    # Numbers, memory, experts
    broken("offload alone", *with_args(DENSE, "--optimizer-cpu-offload"), "megatron-lm.offload-needs-precision-aware",
           "--optimizer-cpu-offload"),
    broken("moments of the plain optimizer", *with_args(DENSE, "--exp-avg-dtype bf16"), "megatron-lm.precision-aware",
           "--exp-avg-dtype"),
    broken("two formats", *with_args(DENSE, "--fp8-format hybrid --fp4-format e2m1"), "megatron-lm.two-formats",
           "--fp4-format", "2x8xB200"),
    broken("fp8 recipe alone", *with_args(DENSE, "--fp8-recipe tensorwise"), "megatron-lm.fp8-recipe-ignored",
           "--fp8-recipe"),
    broken("full recompute without method", *with_args(DENSE, "--recompute-granularity full"), "megatron-lm.recompute",
           "--recompute-granularity"),
    broken("selective with layers",
           *with_args(DENSE, "--recompute-granularity selective --recompute-num-layers 1"), "megatron-lm.recompute",
           "--recompute-num-layers"),
    broken("one layer of each stage", *with_args(
        DENSE, "--recompute-granularity full --recompute-method block --recompute-num-layers 1"),
        "megatron-lm.recompute-one-layer", "--recompute-method"),
    broken("recompute ignored", *with_args(DENSE, "--recompute-method uniform --recompute-num-layers 1"),
           "megatron-lm.recompute-ignored", "--recompute-method"),
    broken("fused loss of Transformer Engine", *with_args(
        DENSE, "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te"), "megatron-lm.te-loss", "-impl te"),
    broken("width without experts", *with_args(DENSE, "--moe-ffn-hidden-size 64"),
           "megatron-lm.expert-width-without-experts", "--moe-ffn-hidden-size"),
    broken("experts as wide as a dense block", EXPERTS.replace("--hidden-size 4096", "--hidden-size 1024").replace(
        "--ffn-hidden-size 14336", "--ffn-hidden-size 3584"), "--num-experts 8", "--num-experts 64",
        "megatron-lm.experts-as-wide-as-dense", "--ffn-hidden-size", MOE_GPUS),
    broken("top 1", EXPERTS, "--moe-router-topk 2", "--moe-router-topk 1", "megatron-lm.top-one", "--moe-router-topk",
           MOE_GPUS),
    broken("bias of experts", EXPERTS, "--moe-grouped-gemm", "--moe-router-enable-expert-bias --moe-grouped-gemm",
           "megatron-lm.bias-needs-sigmoid", "--moe-router-enable-expert-bias", MOE_GPUS),
    broken("groups without a bias", EXPERTS, "--moe-grouped-gemm", "--moe-router-score-function sigmoid "
           "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-grouped-gemm",
           "megatron-lm.groups-without-bias", "--moe-router-score-function", MOE_GPUS),
    broken("experts do not divide", EXPERTS, "--num-experts 8", "--num-experts 12", "moe.experts-divide",
           "--expert-model-parallel-size", MOE_GPUS),
)  # fmt: skip


FSDP = replaced(
    DENSE,
    ("export CUDA_DEVICE_MAX_CONNECTIONS=1\n", ""),
    ("TP=2", "TP=1"),
    ("    --sequence-parallel\n", ""),
    ("--use-distributed-optimizer", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"),
    ("--attention-backend flash", "--ckpt-format fsdp_dtensor"),
)
TORCH = replaced(
    FSDP,
    ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", "--use-torch-fsdp2"),
    ("    --overlap-grad-reduce\n    --overlap-param-gather\n", "    --no-gradient-accumulation-fusion\n"),
    ("--ckpt-format fsdp_dtensor", "--ckpt-format torch_dist"),
)
RARER = (
    Case("valid: Megatron-FSDP", FSDP, gpus="2x8xH100"),
    broken("a batch that grows by iterations", DENSE, "--weight-decay 0.1",
           "--rampup-batch-size 16 16 300 --weight-decay 0.1", "megatron-lm.batch-ramp-up", "--rampup-batch-size"),
    Case("valid: saved in the background", replaced(
        DENSE, ("--attention-backend flash", "--async-save --use-persistent-ckpt-worker")), gpus="2x8xH100"),
    Case("valid: activations offloaded", replaced(
        DENSE, ("TP=2", "TP=2\nexport NVTE_CPU_OFFLOAD_V1=1"),
        ("--attention-backend flash", "--fine-grained-activation-offloading --offload-modules core_attn")),
        gpus="2x8xH100"),
    Case("valid: torch FSDP2", TORCH, gpus="2x8xH100"),
    broken("one connection and FSDP", FSDP, "TP=1", "TP=1\nexport CUDA_DEVICE_MAX_CONNECTIONS=1",
           "megatron-lm.max-connections", "CUDA_DEVICE_MAX_CONNECTIONS"),
    broken("two ways to shard", TORCH, "--use-torch-fsdp2", "--use-torch-fsdp2 --use-distributed-optimizer",
           "megatron-lm.torch-fsdp2-conflicts", "--use-torch-fsdp2"),
    broken("fused accumulation", TORCH, "    --no-gradient-accumulation-fusion\n", "",
           "megatron-lm.torch-fsdp2-conflicts", "--use-torch-fsdp2"),
    broken("torch_dist with Megatron-FSDP", FSDP, "--ckpt-format fsdp_dtensor", "--ckpt-format torch_dist",
           "megatron-lm.fsdp-checkpoint-format", "--ckpt-format"),
    broken("fsdp_dtensor without FSDP", DENSE, "--attention-backend flash", "--ckpt-format fsdp_dtensor",
           "megatron-lm.fsdp-format-without-fsdp", "--ckpt-format"),
    broken("precision-aware alone", *with_args(DENSE.replace("--use-distributed-optimizer", "").replace(
        "--overlap-param-gather", ""), "--use-precision-aware-optimizer"), "megatron-lm.precision-aware",
        "--use-precision-aware-optimizer", "2x8xB200"),
    broken("precision-aware without Adam", *with_args(DENSE, "--use-precision-aware-optimizer --optimizer lion"),
           "megatron-lm.precision-aware", "--use-precision-aware-optimizer"),
    broken("retain interval", *with_args(DENSE, "--save-retain-interval 700"), "megatron-lm.retain-interval",
           "--save-retain-interval"),
    broken("decay without a length", DENSE, "--lr-decay-style cosine", "--lr-decay-style WSD",
           "megatron-lm.wsd-without-decay", "WSD"),
    broken("two activations", DENSE, "--swiglu", "--swiglu --squared-relu", "megatron-lm.two-activations", "--swiglu"),
    broken("two splits", replaced(DENSE, ("parallel-size 1", "parallel-size 2")), "--overlap-grad-reduce",
           "--overlap-grad-reduce\n    --decoder-first-pipeline-num-layers 15\n"
           "    --account-for-loss-in-pipeline-split", "megatron-lm.two-splits", "--account-for-loss"),
    broken("first stage layers without pipeline", *with_args(DENSE, "--decoder-first-pipeline-num-layers 15"),
           "megatron-lm.uneven-without-pipeline", "--decoder-first"),
    broken("top 1, no experts", *with_args(DENSE, "--moe-router-topk 1"), "megatron-lm.top-one", "--moe-router-topk"),
    broken("levels do not multiply", DENSE, "    --sequence-parallel\n",
           "    --sequence-parallel --context-parallel-size 4 --cp-comm-type a2a+p2p\n"
           "    --hierarchical-context-parallel-sizes 2 4\n", "megatron-lm.cp-hierarchy", "--hierarchical"),
    broken("FP8 output projection", *with_args(DENSE, "--fp8-format hybrid --fp8-recipe tensorwise --fp8-output-proj"),
           "megatron-lm.fp8-output-proj", "--fp8-output-proj"),
    broken("activations sharded twice", *with_args(DENSE, "--distribute-saved-activations --recompute-granularity full "
           "--recompute-method uniform --recompute-num-layers 1"),
           "megatron-lm.distributed-activations", "--distribute"),
    broken("layers offloaded in a pipeline", *with_args(PIPELINED, "--cpu-offloading-num-layers 2"),
           "megatron-lm.offload-layers", "--cpu-offloading-num-layers"),
    broken("graphs and segments", DENSE, "--attention-backend flash\n)",
           "--cuda-graph-impl transformer_engine\n)\nexport PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
           "megatron-lm.graphs-registered", "--cuda-graph-impl"),
    broken("graphs of unpadded experts", EXPERTS, "--moe-grouped-gemm",
           "--moe-grouped-gemm --cuda-graph-impl local --moe-expert-capacity-factor 1.0",
           "megatron-lm.graphs-of-unpadded-experts", "--moe-grouped-gemm", gpus=MOE_GPUS),
    broken("weights offloaded too", DENSE, "--attention-backend flash",
           "--fine-grained-activation-offloading --offload-modules core_attn", "megatron-lm.offload-environment",
           "--fine-grained"),
    broken("offload without modules", DENSE, "--attention-backend flash\n)",
           "--fine-grained-activation-offloading\n)\nexport NVTE_CPU_OFFLOAD_V1=1",
           "megatron-lm.offload-without-modules",
           "--fine-grained"),
    broken("restarts without the optimizer state", DENSE, "--attention-backend flash", "--no-load-optim",
           "megatron-lm.state-not-loaded", "--no-load-optim"),
    broken("background saves that wait", DENSE, "--attention-backend flash", "--async-save",
           "megatron-lm.async-without-worker", "--async-save"),
    broken("background saves", DENSE, "--attention-backend flash", "--async-save --ckpt-format torch",
           "megatron-lm.async-format", "--async-save"),
    broken("tokenizer without its model", DENSE, "NullTokenizer", "HuggingFaceTokenizer", "megatron-lm.tokenizer-files",
           "--tokenizer-type"),
    broken("tokenizer of another file", DENSE, "--tokenizer-type NullTokenizer",
           "--tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/tokenizer.model",
           "megatron-lm.tokenizer-format", "--tokenizer-type"),
    broken("tokenizer without its type", DENSE, "    --tokenizer-type NullTokenizer\n", "",
           "megatron-lm.no-tokenizer-type", "--vocab-size"),
)  # fmt: skip


CASES: tuple[Case, ...] = COMMON + RARER


@pytest.mark.parametrize("case", CASES, ids=str)
def test_findings(case: Case) -> None:
    assert found(case, PATH, "megatron-lm") == list(case.expected)


def test_every_rule_has_a_case() -> None:
    found_somewhere = {rule for case in CASES for rule, _ in case.expected} | {"megatron-lm.llama-by-name-only"}
    assert {rule.id for rule in frameworks.framework("megatron-lm").rules} <= found_somewhere


def read(text: str, gpus: str = "2x8xH100", path: str = "train.sh") -> Recipe:
    return frameworks.check(frameworks.framework("megatron-lm"), frameworks.content_of(text, path), gpus=gpus).recipe


def test_finding_has_line_and_fix_in_megatron_flags() -> None:
    text = replaced(DENSE, ("--min-lr 3e-5", "--min-lr 3e-3"))
    result = frameworks.check(
        frameworks.framework("megatron-lm"), frameworks.content_of(text, "a/train.sh"), gpus="2x8xH100"
    )
    (finding,) = result.findings
    assert (finding.file, finding.line, finding.field) == ("a/train.sh", at(text, "--min-lr"), "min_lr")
    assert finding.fix
    assert all(one.startswith("--min-lr ") for one in finding.fix), finding.fix


def test_flags_map_to_recipe_fields() -> None:
    recipe = read(PIPELINED)
    layout = recipe.layout
    assert (layout.strategy, layout.tp, layout.pp, layout.vp, layout.sp) == ("zero1", 2, 4, 4, True)
    assert layout.pp_schedule == "interleaved_1f1b"
    assert (recipe.precision.compute, recipe.optimizer.lr, recipe.optimizer.beta2) == ("bf16", 3e-4, 0.95)
    assert (recipe.data.dataset, recipe.checkpoint.save_every, recipe.checkpoint.resume) == ("mock", 500, True)


def test_megatron_fsdp_shards_everything_by_default() -> None:
    text = replaced(FSDP, (" --data-parallel-sharding-strategy optim_grads_params", ""))
    assert read(text).layout.strategy == "megatron_fsdp"


def test_unset_flags_take_megatron_defaults() -> None:
    recipe = read(BARE, "8xH100", "gpt.args")
    assert (recipe.optimizer.weight_decay, recipe.optimizer.beta2, recipe.schedule.name) == (0.01, 0.999, "linear")
    assert (recipe.layout.strategy, recipe.layout.recompute) == ("ddp", "selective")
    assert (recipe.schedule.warmup_steps, recipe.data.dataset) == (10, "corpus_text_document")
    assert recipe.data.validation_part == pytest.approx(0.03)


def test_samples_convert_to_steps() -> None:
    recipe = read(EXPERTS, MOE_GPUS)
    assert (recipe.train.steps, recipe.schedule.warmup_steps) == (1000000 // 256, 10000 // 256)
    assert recipe.data.blend == {"web": 0.7, "code": 0.3}
    assert recipe.moe.aux_loss == 1e-2


def test_default_batch_follows_from_gpus() -> None:
    text = replaced(DENSE, ("    --global-batch-size 512\n", ""))
    assert [read(text, gpus).train.global_batch_size for gpus in ("2x8xH100", "4x8xH100")] == [8, 16]


def test_expert_tp_defaults_to_tp() -> None:
    text = replaced(EXPERTS, ("--bf16", "--bf16 --tensor-model-parallel-size 2 --sequence-parallel"))
    assert read(text, MOE_GPUS).layout.etp == 2
    assert read(replaced(text, ("--bf16", "--bf16 --expert-tensor-parallel-size 1")), MOE_GPUS).layout.etp == 1


def test_sizes_match_catalog_model() -> None:
    result = frameworks.check(frameworks.framework("megatron-lm"), frameworks.content_of(DENSE, "train.sh"))
    assert result.model is not None
    assert (result.model.name, result.model.params.total) == ("llama3_8b", find("llama3_8b").params.total)


def test_default_flags_build_gpt2() -> None:
    result = frameworks.check(frameworks.framework("megatron-lm"), frameworks.content_of(BARE, "gpt.args"))
    assert result.model is not None
    layer = result.model.layers[0]
    assert (result.model.tied, result.model.learned_positions, layer.norm_params) == (True, 2048, 4 * 2048)


LLAMA = """\
# LLaMA 70B configuration
NUM_LAYERS=80
torchrun --nproc_per_node=8 --nnodes=8 pretrain_gpt.py \\
  --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --sequence-parallel \\
  --num-layers $NUM_LAYERS --hidden-size 8192 --num-attention-heads 64 \\
  --seq-length 4096 --max-position-embeddings 4096 \\
  --micro-batch-size 1 --global-batch-size 1024 --lr 3e-4 --train-iters 100000 \\
  --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --clip-grad 1.0 --bf16 \\
  --use-mcore-models --data-path /path/to/data --vocab-file v.json --merge-file m.txt
"""


def test_llama_by_name_only() -> None:
    case = Case("as in common guides", LLAMA, gpus=None)
    assert found(case, "train.sh", "megatron-lm") == [
        ("megatron-lm.max-connections", 0),
        ("megatron-lm.llama-by-name-only", 2),
        ("key.ignored", 9),
    ]
    plain = case._replace(text=replaced(LLAMA, ("# LLaMA 70B configuration\n", "")))
    assert "megatron-lm.llama-by-name-only" not in dict(found(plain, "train.sh", "megatron-lm"))
    assert "megatron-lm.llama-by-name-only" in dict(found(plain, "train_llama_70b.sh", "megatron-lm"))


def test_runtime_values_are_listed_as_unresolved() -> None:
    text = replaced(
        DENSE, ("--train-iters 10000", "--train-iters $(cat steps)"), ("runs/a\n    --load", "$1\n    --load")
    )
    result = frameworks.check(
        frameworks.framework("megatron-lm"), frameworks.content_of(text, "train.sh"), gpus="2x8xH100"
    )
    assert {one.key for one in result.unresolved} == {"train_iters", "save"}
    assert result.findings == ()


def test_arguments_in_variables_are_read_without_launch_command() -> None:
    text = DENSE[: DENSE.index("torchrun")] + "submit_job run_in_container\n"
    content = frameworks.content_of(text, "train.sh")
    assert frameworks.detect_framework(content).name == "megatron-lm"
    result = frameworks.check(frameworks.framework("megatron-lm"), content, gpus="2x8xH100")
    assert result.model is not None
    assert any("variables" in note for note in result.notes)


@pytest.mark.parametrize("script", ["pretrain_t5.py", "pretrain_bert.py"])
def test_other_models_are_not_checked_as_decoders(script: str) -> None:
    text = replaced(DENSE, ("pretrain_gpt.py", script))
    result = frameworks.check(frameworks.framework("megatron-lm"), frameworks.content_of(text, "train.sh"))
    assert result.model is None
    assert any("not supported" in note for note in result.notes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("([0]*3+[1]*2)", [0, 0, 0, 1, 1]), ("[0]+[1]*2", [0, 1, 1]), ("([1]*1+[0]*1)*2", [1, 0, 1, 0]), ("2", [2])],
)
def test_pattern_is_parsed_without_eval(text: str, expected: list[int]) -> None:
    assert parse_pattern(text) == expected


@pytest.mark.parametrize("text", ["__import__('os')", "[0]*9999999999", "[1" * 300, "()", "[0]-[1]"])
def test_other_expressions_are_rejected(text: str) -> None:
    with suppress(InputError):
        assert len(parse_pattern(text)) < 10**6


@pytest.mark.parametrize(
    ("text", "layers"),
    [("E|(t|)*3,m|m||L", (0, 1, 1, 1, 0, 0, 0, 0)), ("Et*3|(tt|)*2mL", (3, 2, 2, 0)), ("Ett|ttL", (2, 2))],
)
def test_pipeline_layout_string(text: str, layers: tuple[int, ...]) -> None:
    assert parse_pipeline_layout(text, "key", LAYOUT_SYMBOLS) == layers


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 2))
def test_pipeline_layout_string_round_trip(layers: list[int], prediction: int) -> None:
    assert parse_pipeline_layout(format_pipeline_layout(tuple(layers), prediction), "key") == tuple(layers)


FIELDS = draws(
    layout__tp=st.sampled_from([1, 2, 4]),
    layout__cp=st.sampled_from([1, 2]),
    layout__sp=st.booleans(),
    layout__strategy=st.sampled_from(["zero1", "ddp", "fsdp2", "megatron_fsdp"]),
    layout__micro_batch_size=st.sampled_from([1, 2, 4]),
    layout__recompute=st.sampled_from(["none", "selective", "full"]),
    layout__recompute_modules=st.lists(st.sampled_from(["core_attn", "layernorm", "mlp"]), unique=True).map(tuple),
    layout__cp_comm=st.sampled_from(["ring", "a2a", "allgather"]),
    layout__offload=st.sampled_from(["none", "optimizer", "activations"]),
    layout__embedding_as_layer=st.booleans(),
    layout__head_as_layer=st.booleans(),
    layout__dp_replicate=st.sampled_from([1, 2]),
    layout__reshard_after_forward=st.booleans(),
    train__global_batch_size=st.integers(1, 4096),
    train__steps=st.integers(1, 10**6),
    train__seed=st.integers(0, 2**31),
    train__eval_every=st.integers(0, 10**4),
    train__eval_steps=st.integers(1, 100),
    train__log_every=st.integers(1, 100),
    train__per_token_loss=st.booleans(),
    train__check_nan=st.booleans(),
    train__profile=st.booleans(),
    optimizer__name=st.sampled_from(["adamw", "muon", "lion", "sgd"]),
    optimizer__lr=st.floats(1e-6, 1),
    optimizer__weight_decay=st.floats(0, 1),
    optimizer__beta1=st.floats(0, 0.999),
    optimizer__eps=st.floats(1e-12, 1e-3),
    optimizer__clip_grad=st.floats(0, 10),
    optimizer__muon_momentum=st.floats(0.1, 0.99),
    schedule__name=st.sampled_from(["cosine", "linear", "wsd", "constant", "inverse_sqrt"]),
    schedule__warmup_steps=st.integers(0, 10**4),
    schedule__decay_steps=st.integers(0, 10**6),
    schedule__min_lr=st.floats(0, 1e-6),
    precision__compute=st.sampled_from(["bf16", "fp16", "fp32"]),
    precision__matmul=st.sampled_from(["same", "fp8_delayed", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"]),
    precision__moments=st.sampled_from(["fp32", "bf16"]),
    precision__grads=st.sampled_from(["fp32", "bf16"]),
    precision__reduce=st.sampled_from(["fp32", "bf16"]),
    precision__fp8_gather=st.booleans(),
    precision__first_last_bf16=st.booleans(),
    kernels__attention=st.sampled_from(["auto", "flash", "cudnn", "sdpa", "eager"]),
    kernels__cuda_graph_scope=st.lists(st.sampled_from(["attn", "mlp", "moe"]), unique=True).map(tuple),
    kernels__overlap_grad_reduce=st.booleans(),
    kernels__overlap_param_gather=st.booleans(),
    kernels__tp_comm_overlap=st.booleans(),
    kernels__loss=st.just("vocab_parallel"),
    kernels__deterministic=st.booleans(),
    kernels__te_rng_tracker=st.booleans(),
    moe__balancing=st.sampled_from(["aux_loss", "seq_aux_loss", "global_aux_loss", "bias", "none"]),
    moe__aux_loss=st.floats(0, 1),
    moe__router_z_loss=st.floats(0, 1),
    moe__capacity_factor=st.floats(0, 4),
    moe__router_dtype=st.sampled_from(["fp32", "bf16"]),
    moe__dispatcher=st.sampled_from(["alltoall", "allgather", "deepep", "hybridep"]),
    moe__grouped_gemm=st.booleans(),
    moe__force_balance=st.booleans(),
    data__dataset=st.sampled_from(["mock", "/data/tokens", "with 'quotes' and $HOME", "a,b"]),
    data__blend=st.sampled_from([{}, {"a": 0.5, "b c": 2.0}]),
    data__seq_length=st.sampled_from([1024, 4096, 8192]),
    data__validation_part=st.sampled_from([0.0, 0.01, 0.25]),
    data__tokenizer=st.sampled_from(["", "/models/own tokenizer"]),
    data__workers=st.integers(0, 9),
    checkpoint__save_every=st.integers(1, 10**4),
    checkpoint__milestone_every=st.integers(0, 10**4),
    checkpoint__async_save=st.booleans(),
    checkpoint__resume=st.booleans(),
    checkpoint__pretrained=st.sampled_from(["", "/weights/a b"]),
)
STAGES: list[dict[str, Any]] = [
    {},
    {"layout.pp": 4, "layout.vp": 2, "layout.pp_schedule": "interleaved_1f1b"},
    {"layout.pp": 2, "layout.stage_layers": (10, 22)},
    {"layout.recompute": "full", "layout.recompute_layers": 3},
    {"layout.cp": 4, "layout.cp_comm": "a2a+ring", "layout.cp_inner": 2},
    {"kernels.cuda_graphs": "local", "kernels.te_rng_tracker": True},
]


@settings(max_examples=30)
@given(FIELDS, st.sampled_from(STAGES), st.sampled_from(["llama3_8b", "qwen3_30b_a3b", "deepseek_v2_lite"]))
def test_export_round_trip(values: dict[str, Any], stages: dict[str, Any], model: str) -> None:
    base = changed(pretrain(model, 64), {"layout.strategy": "zero1", "checkpoint.async_save": False})
    fields = {**values, **stages}
    if fields.get("data.blend"):
        fields.pop("data.dataset", None)  # a blend replaces the dataset
    recipe = changed(base, fields)
    if recipe.layout.recompute != "full":
        recipe = changed(recipe, {"layout.recompute_layers": 0})
    assert unmapped("megatron-lm", recipe, model, "64xH100") == not_expressible(recipe)


def not_expressible(recipe: Recipe) -> dict[str, str]:
    """Megatron-LM counts validation batches and has no key for the whole set."""
    whole_set = bool(recipe.train.eval_every) and not recipe.train.eval_steps
    return {"train.eval_steps": "Megatron-LM would use 100"} if whole_set else {}


@settings(max_examples=15)
@given(FIELDS)
def test_fine_tuning_export_round_trip(values: dict[str, Any]) -> None:
    recipe = changed(sft("llama3_8b", 8), {"layout.strategy": "zero1", "data.packing": True, **values})
    if recipe.data.blend:
        recipe = changed(recipe, {"data.dataset": "mock"})
    if not recipe.checkpoint.save_every:
        recipe = changed(recipe, {"checkpoint.resume": True})
    if recipe.layout.recompute != "full":
        recipe = changed(recipe, {"layout.recompute_layers": 0})
    assert unmapped("megatron-lm", recipe, "llama3_8b", "8xH100") == not_expressible(recipe)


SHIPPED = index.names()[::10]


def trains(recipe: Recipe) -> bool:
    """Return whether Megatron-LM flags can express this goal and model."""
    model = find(recipe.model)
    strange = model.family in ("gemma", "gpt_oss", "olmoe") or model.name.startswith(("gemma", "gpt_oss", "olmoe"))
    return recipe.goal != "peft" and model.kind == "causal_lm" and model.vision is None and not strange


def test_shipped_recipes_lose_only_listed_fields() -> None:
    theirs = frameworks.framework("megatron-lm")
    lost: set[str] = set()
    for name in SHIPPED:
        recipe = planner.with_engine_strategy(index.load(name), theirs.engine)
        if not trains(recipe):
            continue
        written = frameworks.export(theirs, recipe, find(recipe.model), cluster(recipe.cluster))
        lost |= {one.field for one in written.unmapped}
        (path, text), *_ = written.files.items()
        result = frameworks.check(theirs, frameworks.content_of(text, path), gpus=recipe.cluster)
        theirs_only = [one for one in result.findings if one.rule.startswith(("megatron-lm.", "key.", "value."))]
        assert theirs_only == [], (name, theirs_only)
        assert result.model is not None
        assert result.model.params.total == find(recipe.model).params.total, name
    assert lost <= {
        "kernels.loss", "kernels.compile", "data.pad_to_max_length", "data.packing", "precision.master",
        "layout.dp_shard", "kernels.tp_comm_overlap", "precision.moments", "precision.grads", "schedule.warmup_steps",
        "checkpoint.keep",
    }  # fmt: skip


def test_unmapped_fields_are_listed() -> None:
    recipe = changed(pretrain("llama3_8b", 8), {"kernels.attention": "flex", "optimizer.name": "schedule_free_adamw"})
    written = frameworks.export(frameworks.framework("megatron-lm"), recipe, find("llama3_8b"), cluster("8xH100"))
    assert {"kernels.attention", "optimizer.name"} <= {one.field for one in written.unmapped}


@pytest.mark.parametrize("name", ["llama3_8b_peft_config", "gemma2_2b_pretrain_config"])
def test_unsupported_recipe_is_rejected(name: str) -> None:
    recipe = index.load(name)
    with pytest.raises(InputError, match="Megatron-LM"):
        frameworks.export(frameworks.framework("megatron-lm"), recipe, find(recipe.model), cluster(recipe.cluster))


def test_a_model_whose_norms_no_flag_has_is_refused_with_the_reason() -> None:
    recipe = index.load("olmoe_7b_pretrain_config")
    with pytest.raises(InputError, match="normalizes every head, and this model its whole queries and keys"):
        frameworks.export(frameworks.framework("megatron-lm"), recipe, find(recipe.model), cluster("8xH200"))


def test_program_includes_environment() -> None:
    theirs, recipe = frameworks.framework("megatron-lm"), changed(pretrain("llama3_8b", 8), {"layout.tp": 2})
    for gpus, expected in (("8xH100", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}), ("8xB200", {})):
        zero1 = changed(recipe, {"layout.strategy": "zero1"})
        written = frameworks.export(theirs, zero1, find("llama3_8b"), cluster(gpus))
        assert written.program.env == expected
        assert written.program.argv[0] == "pretrain_gpt.py"
