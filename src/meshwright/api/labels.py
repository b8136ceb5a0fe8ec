"""Words of reports that are no terms: headings, titles of options, values of fields and keys of cluster files."""

from __future__ import annotations

HEADINGS = {
    "against": "what differs between the fastest layout and the recipe's own",
    "assumed": "what your input left open, and the value that was taken for it; write it to choose another",
    "budget": "time, GPU-hours and cost of a number of tokens: --tokens and --price, or train.epochs over a file",
    "changed": "fields that differ from the shipped recipe: layout changes memory and speed, contract the weights",
    "consider": "changes that may be worth it but are never applied by themselves; paste them as overrides",
    "dropped": "layouts that the search left out, by reason; or settings of a file that have no field here",
    "executes": "values of a field that an engine runs; others are refused, or ignored with a warning",
    "needs": "the smallest cluster of the same nodes on which the training fits",
    "not_imported": "settings of another framework's file that our recipes have no field for",
    "options": "ways to make a training fit, in the order of what they cost; each with the command that plans it",
    "original": "the published layout of the recipe, and what it would cost on these GPUs",
    "pareto": "layouts of which none is both faster and smaller than another: step time and memory",
    "repair": "the smallest set of overrides that removes all errors at once",
    "storage": "size of a checkpoint and of those that are kept",
    "checkpoint_storage": "size of a checkpoint and of those that are kept (checkpoint.keep): the weights, master "
    "weights and moments of all parameters. meshwright size and meshwright launch print it",
    "suggestions": "changes that may be worth it but are never applied by themselves; paste them as overrides",
    "trade": "layouts of which none is both faster and smaller than another: step time and memory",
    "unknown": "values of a file that are only known when it runs",
    "unmapped": "recipe fields that the framework has no key for: set them there in another way",
}
"""Heading of a report → meaning."""

TITLES = {
    "a faster layout": "the search found a faster layout than the published one, which was kept; the same weights",
    "a faster step": "kernels, loss and sharding that compute the same weights in less time, at more memory",
    "a leaner step": "recompute, a loss without full logits, earlier gradient reduction: less memory, the same weights",
    "QLoRA": "adapters on base weights in 4 bits (peft.method=qlora)",
    "8-bit moments": "the optimizer's moments are stored in 8 bits (optimizer.name=adamw8bit)",
    "bf16 moments": "the optimizer's first moment is stored in bf16 (precision.moments=bf16)",
    "bf16 weights and moments": "master weights and moments are stored in bf16; small updates are lost",
    "bf16 weights, 8-bit moments": "master weights in bf16 and moments in 8 bits; small updates are lost",
    "compute linear layers in fp8": "matmuls of linear layers in 8 bits (precision.matmul): faster, other weights",
    "fit the batch to the GPUs": "a batch that divides into more layouts of these GPUs",
    "keep the tokens per step": "another sequence length changes the tokens per step; this batch restores them",
    "more updates of your data": "every step is one update, however many samples it averages: a smaller batch has more",
    "offload to host memory": "state or activations are kept in host memory: less GPU memory, slower, the same weights",
    "fewer nodes are as fast": "the other nodes hardly save time: the batch divides better into layouts of fewer GPUs",
    "fewer nodes are faster": "the batch divides better into the layouts of fewer GPUs",
    "scale the batch": "more GPUs train a larger batch better, with a learning rate scaled to it: a new experiment",
    "shard the optimizer state": "each data-parallel rank holds a part of the optimizer state instead of all of it",
    "shorter samples": "samples are cut to fewer tokens (data.seq_length)",
}
"""Title of an option or a suggestion → meaning."""

VALUES = {
    "1f1b": "pipeline schedule: each stage alternates one forward and one backward pass, so few activations are held",
    "gpipe": "pipeline schedule: all forward passes, then all backward passes; holds every micro batch's activations",
    "interleaved_1f1b": "1F1B with several chunks of layers per stage (layout.vp): a smaller bubble, more transfers",
    "looped_bfs": "interleaved schedule that runs all micro batches of a chunk before the next chunk",
    "interleaved_zero_bubble": "interleaved schedule that fills the bubble with weight gradients, computed apart",
    "zbv": "zero-bubble schedule with two chunks per stage placed in a V: the first stage also holds the last layers, "
    "and weight gradients, computed apart, fill the bubble",
    "dualpipe_v": "DeepSeek's DualPipe with two chunks per stage placed in a V: forward and backward passes overlap",
    "alltoall": "experts' tokens are exchanged by NCCL's all-to-all",
    "allgather": "every rank gets all tokens and keeps those of its experts, or all keys and values of a sequence",
    "deepep": "DeepSeek's kernels that send tokens to experts, for NVLink and InfiniBand",
    "hybridep": "NVIDIA's kernels that send tokens to experts, hierarchically within and between nodes",
    "a2a": "context parallelism that exchanges heads for parts of the sequence (Ulysses)",
    "ring": "context parallelism that sends keys and values around a ring of ranks",
    "fp8_tensor": "8-bit matmuls with one scale per tensor",
    "fp8_row": "8-bit matmuls with one scale per row",
    "fp8_block": "8-bit matmuls with one scale per block of 128 × 128, as DeepSeek-V3 trained",
    "fp8_delayed": "8-bit matmuls with scales from earlier steps (Transformer Engine)",
    "mxfp8": "8-bit matmuls with one power-of-two scale per 32 values; tensor cores of Blackwell",
    "nvfp4": "4-bit matmuls with one 8-bit scale per 16 values; tensor cores of Blackwell",
    "bf16": "16-bit floating point with fp32's range: the usual format of training since Ampere",
    "fp16": "16-bit floating point with a small range: gradients need loss scaling; bf16 needs none",
    "adamw": "Adam with decoupled weight decay: two moments per parameter, 8 bytes in fp32",
    "cosine": "learning-rate schedule that falls from its peak like half a cosine, to schedule.min_lr",
    "adamw8bit": "AdamW whose moments are stored in 8 bits",
    "muon": "optimizer that orthogonalizes the momentum of weight matrices; other parameters use AdamW",
    "lion": "optimizer that applies the sign of its momentum: half of AdamW's state",
    "schedule_free_adamw": "AdamW that averages weights instead of decaying the learning rate",
    "wsd": "learning-rate schedule: warmup, stable, decay",
    "rex": "learning-rate schedule that decays slowly first and fast at the end",
    "fused_linear": "the loss multiplies by the output matrix chunk by chunk, so no full logits exist",
    "chunked": "the loss computes logits chunk by chunk",
    "vocab_parallel": "the loss on logits that stay sharded over the vocabulary",
    "flex": "FlexAttention: compiled attention with windows and document masks",
    "sdpa": "PyTorch's scaled_dot_product_attention, which chooses a kernel",
    "lora8bit": "LoRA on frozen weights in 8 bits (LLM.int8)",
    "rslora": "LoRA whose scale is alpha / sqrt(rank)",
    "full_iteration": "one CUDA graph holds the whole training step",
}
"""Value of a recipe field → meaning."""

CLUSTER_KEYS = {
    "gpus_per_node": "GPUs of one node",
    "network_gb_s": "network of one GPU between nodes, one direction: a number is in GB/s, or write the unit: "
    'network_gb_s = "400 Gb/s" (50 GB/s)',
    "network_gb_s_per_node": "network of all GPUs of a node together, one direction: a number is in GB/s, or write the "
    'unit: network_gb_s_per_node = "100 Gb/s" (12.5 GB/s)',
    "nvlink_gb_s": "link of one GPU to the others of its node or rack, one direction, in GB/s; or with its unit",
    "nvlink_domain": "GPUs that are connected at nvlink_gb_s",
    "memory_gib": "memory of one GPU in GiB, as its driver reports it",
    "host_gib": "host memory for each GPU, in GiB",
    "storage_gb_s": "what all GPUs together write to the file system of checkpoints, in GB/s or with its unit; without "
    "it, 1 GB/s per GPU and 2,000 GB/s in all are assumed",
    "hbm_gb_s": "bandwidth of the GPU's memory in GB/s",
    "peak_tflops": "dense peak of one GPU by format: { bf16 = 989.5, fp8 = 1979 }",
}
"""Key of a cluster file → meaning."""
_OF_CLUSTERS = {name: f"key of a cluster file: {meaning}" for name, meaning in CLUSTER_KEYS.items()}


def _key(text: str) -> str:
    return text.strip(" :").lower().replace(" ", "_").replace("-", "_")


LABELS = {_key(name): meaning for table in (HEADINGS, TITLES, VALUES, _OF_CLUSTERS) for name, meaning in table.items()}
"""All of them, by lower-case name with underscores."""
