"""Our terms in responses, each explained once: in the legend of a report, in tooltips and by `meshwright explain`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from meshwright.api.common_words import COMMON_WORDS
from meshwright.clusters import FILE_KEYS
from meshwright.recipes.types import recipe_fields

TERMS = {
    "contract": "settings that determine the trained weights (data, batch, optimizer); a change is a new experiment",
    "layout": "settings that only determine memory and speed (tp, pp, micro batch, recompute), not the trained weights",
    "benchmark": "settings for throughput runs on mock data, never for production",
    "exact": "the shipped recipe of this model for these GPUs, unchanged",
    "resized": "the shipped recipe of this model, adapted to these GPUs or to your settings",
    "closest": "no shipped recipe trains this model for this goal; the recipe of the most similar model is adapted",
    "derived": "the model is yours, not a catalogue one; the recipe of the most similar model is adapted",
    "weights": "parameters of this GPU, in the format they are computed with",
    "gradients": "gradients of this GPU's parameters, where they outlive the backward pass",
    "optimizer": "memory: moments and master weights; step time: the update",
    "activations": "tensors saved for the backward pass",
    "logits": "output over the vocabulary and its gradient, in the loss",
    "buffers": "gathered weight shards, communication and working tensors of the layer being computed",
    "overhead": "CUDA context, communicators and memory that the allocator caches",
    "compute": "matrix products and other kernels",
    "tp": "tensor parallelism; in the step time its communication that compute does not hide",
    "cp": "context parallelism; in the step time its communication that compute does not hide",
    "ep": "expert parallelism; in the step time the token dispatch that compute does not hide",
    "dp": "data parallelism; in the step time gathers and reductions that compute does not hide",
    "pp_bubble": "time in which pipeline stages wait for each other",
    "other": "idle time between kernel launches, slow ranks, and the fixed cost of a step",
    "recompute": "activations computed again in the backward pass to save memory: none, selective (the ones that are "
    "cheap to compute, such as attention), or full (all of every layer)",
    "band": "the interval, in percent, that contains 80 % of comparable published measurements",
    "requeue": "SLURM starts a job again after preemption or its time limit; a training resumes from its latest "
    "checkpoint. Jobs of meshwright launch requeue themselves: --no-requeue, --max-requeues N, --save-minutes N",
    "goodput": "share of the time that trains, after failures, restarts and checkpoints",
    "mtbf": "mean time between failures: the hours that one GPU runs on average until a failure ends the run; goodput "
    "and the advised checkpoint interval follow from it. --mtbf-hours sets it",
    "spare": "a node that is kept free to replace one that fails, so that the run restarts at once in place of waiting "
    "for the repair; meshwright size says how many pay",
    "long_context_extension": "training a model on longer sequences than it has positions: data.seq_length=N (--seq "
    "128k) with architecture.rope_theta=N, a larger RoPE base, from its weights (checkpoint.pretrained), on few "
    "tokens; layout.cp shards the sequence over GPUs",
    "cluster_file": 'a TOML file that describes your cluster, for --gpus FILE.toml: gpu = "H100", nodes = 4 and '
    f"gpus_per_node = 8, and what differs from usual ones. Its keys: {', '.join(FILE_KEYS)}",
    "nvl72": "a rack of 72 GPUs that NVLink connects as one domain, in 18 nodes of 4: tensor and expert parallelism "
    "may span nodes; --gpus GB200-NVL72 is one rack, --gpus 72xGB200 the same GPUs",
    "headroom": "memory left free, because estimates have a band",
    "mfu": "model FLOPs utilization: the FLOPs that the model needs per second over the GPU's peak in the same format; "
    "recomputed activations do not count. Frameworks differ in how they count attention",
    "fits": "the run fits with a chance of at least 90 %, by the error of past estimates",
    "probably_fits": "the run fits with a chance of 70 to 90 %, by the error of past estimates",
    "may_not_fit": "the run fits with a chance of 50 to 70 %: a dry run or a short run tells",
    "probably_does_not_fit": "the run fits with a chance of 10 to 50 %, by the error of past estimates",
    "does_not_fit": "the run fits with a chance below 10 %, by the error of past estimates",
    "fsdp": "fully sharded data parallelism: each data-parallel rank holds a shard of weights, gradients and optimizer "
    "state, and gathers the weights of a layer when it computes it; layout.strategy=fsdp2",
    "fsdp2": "PyTorch's fully_shard (DTensor) implementation of fully sharded data parallelism",
    "fsdp1": "PyTorch's older FullyShardedDataParallel wrapper with flattened parameters",
    "megatron_fsdp": "Megatron-Core's implementation of fully sharded data parallelism",
    "ddp": "data parallelism with a full copy of weights, gradients and optimizer state on every rank",
    "efsdp": "torchtitan's mesh axis that shards expert weights: the data-parallel ranks that are left beside ep",
    "hsdp": "hybrid sharding: groups of dp_shard ranks shard the state, and dp_replicate groups hold copies of it",
    "zero": "DeepSpeed's sharding: stage 1 shards the optimizer state (layout.strategy=zero1), stage 2 also gradients "
    "(fsdp2 without reshard_after_forward), stage 3 also weights (fsdp2)",
    "zero_1": "ZeRO stage 1: the optimizer state is sharded over the data-parallel ranks; layout.strategy=zero1",
    "zero_2": "ZeRO stage 2: optimizer state and gradients are sharded; fsdp2 with reshard_after_forward=false",
    "zero_3": "ZeRO stage 3: optimizer state, gradients and weights are sharded; layout.strategy=fsdp2",
    "oom": "out of memory: an allocation on the GPU failed; meshwright doctor LOG finds what fits",
    "tps": "tokens per second; torchtitan logs them per GPU",
    "tflops": "10^12 floating-point operations per second of one GPU; frameworks differ in what they count",
    "tflop/s": "10^12 floating-point operations per second of one GPU; frameworks differ in what they count",
    "bubble": "time in which pipeline stages wait for each other",
    "nvlink": "the fast link between the GPUs of a node or rack; tensor parallelism should stay inside it",
    "ulysses": "context parallelism that exchanges heads for parts of the sequence: layout.cp_comm=a2a",
    "tokens/s/gpu": "trained tokens per second, divided by the number of GPUs",
    "micro_batch": "the samples of one forward pass on one rank; several are accumulated per optimizer step",
    "gradient_accumulation": "micro batches per rank and optimizer step: global batch / (micro batch × dp)",
    "per_pass": "micro batches of one run of the pipeline schedule, which fills and drains the stages; torchtitan and "
    "AutoModel run one per local batch: layout.pp_micro_batches",
    "activation_checkpointing": "another name of recompute: activations are computed again in the backward pass",
    "gradient_checkpointing": "another name of recompute: activations are computed again in the backward pass",
    "loss_mask": "which tokens of a fine-tuning sample are in the loss: the answers, by data.train_on and the chat "
    "template; meshwright samples RECIPE --dataset FILE shows them",
    "lora": "low-rank adapters: the weights are frozen, and small matrices beside the linear layers are trained",
    "qlora": "LoRA on frozen weights that are stored in 4 bits (NF4)",
    "lora8bit": "LoRA on frozen weights that are stored in 8 bits (LLM.int8 of bitsandbytes): Accelerate, DeepSpeed "
    "and AutoModel run it, our engine has qlora",
    "dora": "LoRA that also trains the length of each weight column",
    "moe": "mixture of experts: a router sends every token to a few of many feed-forward blocks",
    "vp": "virtual pipeline: each stage holds several chunks of layers, which shrinks the bubble",
    "sp": "sequence parallelism: norms and residuals are sharded over the tp ranks too",
    "pp": "pipeline parallelism: each stage holds consecutive layers",
    "recipe": "a named training: contract, layout and the cluster it was made for",
    "goal": "pretrain (all weights, plain text), sft (all weights, prompts and answers) or peft (adapters)",
    "cluster": "GPU type, number of nodes, GPUs per node, links and their bandwidths",
    "engine": "the program that executes a recipe: ours, Megatron, torchtitan, AutoModel, KempnerForge or DeepSpeed",
    "framework": "a program whose config files and launch scripts we read and write",
    "plan": "a recipe sized to a cluster, with its estimate, findings and launch commands",
    "estimate": "predicted memory and step time by part, with an uncertainty band",
    "rule": "an executable check with symptom, cause and fixes",
    "finding": "one violation that a rule reports, or one problem that the doctor reports: error, warning or advice",
    "suggestion": "a contract change that may be worth an experiment; it is never applied automatically",
    "case": "one flat, read-only view of recipe, model, cluster and engine",
    "dry_run": "the engine's real training step at full world size, on tensors without data",
    "verification_report": "recorded results of rules, estimate, dry run and tiny training of a shipped recipe",
    "parity": "losses, gradients and weights of a parallel run equal those of one process within 1e-5",
    "calibration_profile": "measured rates of a GPU type and an engine that the estimate uses",
    "enroot": "NVIDIA's container runtime without root: it unpacks a Docker image to a squashfs file (enroot import "
    "docker://IMAGE) and starts it as the user",
    "pyxis": "the SLURM plugin that runs a step in an Enroot container: srun --container-image=FILE.sqsh "
    "--container-mounts=/data:/data; meshwright launch --container-kind pyxis writes it",
    "nccl_tests": "NVIDIA's benchmarks of NCCL's collectives (github.com/NVIDIA/nccl-tests): all_reduce_perf -b 8 "
    "-e 8G -f 2 -g 1 over the job's nodes prints the bus bandwidth per message size; comparing pairs of nodes finds a "
    "slow one",
    "bus_bandwidth": "busbw of nccl-tests: the rate of the slowest link, comparable with its hardware: for all-reduce "
    "2 × (n - 1) / n × bytes / time. Over several nodes large messages usually reach 80 to 95 % of a GPU's network "
    "rate times the GPUs of a node: 320 to 390 GB/s on 8 × 400 Gb/s",
    "busbw": "bus bandwidth, the column of nccl-tests to compare with the links; meshwright explain bus_bandwidth",
    "checkpoint_interval": "how often to save checkpoints: about the square root of 2 × the time that a save blocks "
    "training × the mean time between failures; meshwright size --tokens N and recommend --days say which "
    "checkpoint.save_every that is, and what another costs",
    "doctor": "the command that diagnoses a run from its logs",
    **COMMON_WORDS,
}
"""Term → meaning."""
IN_SENTENCES = (
    "tp", "pp", "vp", "cp", "ep", "etp", "dp", "sp", "dp_shard", "dp_replicate", "micro_batch", "gradient_accumulation",
    "activation_checkpointing", "gradient_checkpointing", "recompute", "mfu", "tflops", "goodput", "mtbf", "nvl72",
    "nvlink", "fsdp", "fsdp1", "fsdp2", "megatron_fsdp", "ddp", "hsdp", "efsdp", "zero_1", "zero_2", "zero_3",
    "ulysses", "lora", "qlora", "dora", "moe", "loss_mask", "dry_run", "calibration_profile", "verification_report",
    "cluster_file",
)  # fmt: skip
"""Terms that a page explains inside sentences too; the others are everyday words, explained where they stand alone."""
LEGEND = {
    "resized": "this model's recipe, adapted to your GPUs or settings",
    "closest": "recipe of the most similar model",
    "derived": "recipe of the most similar model, for your own model",
    "contract": "changes the trained weights",
    "layout": "changes only memory and speed",
    "buffers": "gathered shards, communication",
    "overhead": "CUDA context, allocator cache",
    "other": "launch gaps, slow ranks",
}
"""The same in a few words, for the line under a report."""


@cache
def meanings() -> Mapping[str, str]:
    """Return the terms and the layout's fields, each with its meaning in one sentence."""
    fields = {key.partition(".")[2]: one.text for key, one in recipe_fields().items() if one.kind == "layout"}
    return {**fields, **TERMS}


VISIBLE_GIB, VISIBLE_SHARE = 0.05, 0.005


def legend(answer: Mapping[str, Any], step_parts: bool = False) -> str:
    """Return the terms that a plan's report uses, each with its meaning, on one line; empty if there are none."""
    estimate, recipe = answer["estimate"], answer["recipe"]
    kinds = {change["kind"] for change in answer.get("changes", ())}
    used = [recipe["match"]] if recipe.get("match") in LEGEND else []
    used += [kind for kind in ("contract", "layout") if kind in kinds]
    used += [part for part in ("buffers", "overhead") if estimate["memory_gib"][part] >= VISIBLE_GIB]
    if step_parts and estimate["step_parts_s"]["other"] >= VISIBLE_SHARE * estimate["step_s"]:
        used.append("other")
    return "; ".join(f"{term}: {LEGEND[term]}" for term in used)
