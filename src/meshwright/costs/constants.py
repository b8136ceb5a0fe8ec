"""Every tuned number of the cost model, each with its reason. Facts of GPUs live with the clusters, not here."""

from __future__ import annotations

# Memory -----------------------------------------------------------------------------------------------------------

# CUDA context, kernels and cuBLAS workspaces: 0.5-1 GB context plus 32 MiB workspaces per stream on Hopper.
CONTEXT_GIB = 0.9
# NCCL channels and proxies of one process group of size > 1 (buffers of 4 MiB x channels, both directions).
COMMUNICATOR_GIB = 0.15
# Caching-allocator loss: SimuMax B200 rows have reserved/allocated 1.03 where state dominates, 1.08 else.
FRAGMENTATION_STATE = 0.01
FRAGMENTATION_DYNAMIC = 0.10
# A plan fits when this share of the GPU stays free: the driver and other processes take some, and step 2 peaks higher.
RESERVE = 0.02

# Bytes per logit alive at the peak of the loss.
LOGIT_BYTES = {
    "megatron": 10.0,  # bf16 logits, fp32 copy whose softmax is kept, gradient: SimuMax B200 rows give 10.6
    "kempnerforge": 6.0,  # bf16 throughout: logits, log-softmax, gradient; 7B at micro batch 4 and 8 agree
    "fsdp1": 8.0,  # fused cross-entropy of flash-attn on bf16 logits; LLM Foundry's largest micro batches need <= 8
    "torch": 14.0,  # bf16 logits, fp32 copy, fp32 log-softmax, fp32 gradient
}
LOGIT_BYTES_GATHERED = 2.0  # a rank's own slice and the gathered copy, where tp ranks gather logits before the loss
LOSS_CHUNKS = 8  # chunked losses cut the tokens into this many pieces
FUSED_CHUNK_TOKENS = 1024  # a fused linear cross-entropy works on about this many tokens at a time

# Backward of one layer holds its gradients beside its activations; about a third of them are alive at once.
BACKWARD_WORKING_SET = 0.35
# FSDP2 keeps the current and the prefetched layer gathered.
GATHERED_LAYERS = 2.0
# Routing that is not forced to balance: load of the fullest rank over the mean.
EXPERT_IMBALANCE = 1.15
# Share of the sequence that is image tokens when samples carry images.
IMAGE_SHARE = 0.5
# Tokens between stored states of a chunked scan (Mamba-2 256, gated delta rule 64).
MAMBA_CHUNK = 256
DELTA_CHUNK = 64
# NF4: half a byte and one fp32 scale per 64 weights, itself quantised.
NF4_BYTES = 0.516

# Time -------------------------------------------------------------------------------------------------------------
# Efficiencies, passes and launch times were started from data-sheet reasoning and then tuned on published steps (33
# sources, each counting the same), which took the median error from 18 to 12 per cent. Tuned on half of the sources,
# the other half is met with a median error of 12 to 13 per cent.

# Share of the dense peak that large matmuls reach in a running training (clocks under load included), by architecture.
MATMUL_EFFICIENCY = {
    "ampere": {"bf16": 0.68, "fp32": 0.70, "tf32": 0.65},
    "ada": {"bf16": 0.65, "fp8": 0.60},
    "hopper": {"bf16": 0.66, "fp8": 0.70},
    "blackwell": {"bf16": 0.50, "fp8": 0.53, "fp4": 0.48},
    "rubin": {"bf16": 0.50, "fp8": 0.50, "fp4": 0.45},
    "cdna3": {"bf16": 0.50, "fp8": 0.45},
}
MATMUL_EFFICIENCY_ELSE = 0.60
# A matmul m x n x k reaches 1 / (1 + D/m + D/n + D/k) of that: tiles at the edge, pipeline fill, launch.
MATMUL_EDGE = {"bf16": 150.0, "fp8": 220.0, "fp4": 440.0, "fp32": 80.0, "tf32": 100.0}
# Grouped matmuls of experts, over the same formula.
GROUPED_EFFICIENCY = 0.80
# Flash attention forward plus backward, share of the bf16 peak over the causal half.
ATTENTION_EFFICIENCY = {
    "ampere": 0.42, "ada": 0.45, "hopper": 0.45, "blackwell": 0.45, "rubin": 0.45, "cdna3": 0.30
}  # fmt: skip
ATTENTION_BACKWARD = 2.5  # backward recomputes the scores: five matmuls for the forward's two
# Linear-time mixers run below matmul speed: chunked scans are many small matmuls.
SCAN_EFFICIENCY = 0.15
# Memory-bound kernels (norms, rotary, activations, residuals, casts): passes over the kept activations, fwd + bwd.
PASSES_FUSED = 7.0
PASSES_EAGER = 8.0  # without compile or fused kernels
HBM_EFFICIENCY = 0.75
# Share of the forward pass that is done again.
SELECTIVE_AGAIN = 0.35  # op-level: every second matmul
# Collectives reach this share of the link's rate, and start after this long.
LINK_EFFICIENCY = 0.80
COLLECTIVE_LATENCY_S = 15e-6
# All-to-all moves small pieces to many peers.
ALL_TO_ALL_EFFICIENCY = 0.75
# Share of a communication that stays visible although it overlaps with compute: start, end, shared SMs and HBM.
VISIBLE = 0.10
TP_OVERLAP_VISIBLE = 0.40
EP_OVERLAP_VISIBLE = 0.35
# The bubble of a schedule over that of 1F1B with the same stages: zero-bubble fills it with weight gradients.
BUBBLE = {
    "1f1b": 1.0,
    "gpipe": 1.0,
    "interleaved_1f1b": 1.0,
    "looped_bfs": 1.0,
    "interleaved_zero_bubble": 0.5,
    "zbv": 0.25,
    "dualpipe_v": 0.35,
}
# Optimizer bytes moved per trained parameter beyond reading and writing its state once each: gradient norm and clip.
CLIP_PASSES = 2.0
HOST_LINK_GB_S = 25.0  # PCIe rate of offloaded state, one direction
# CPU time to launch one layer's kernels, forward and backward; CUDA graphs and compile cut it.
LAUNCH_S = 2.5e-3
LAUNCH_GRAPHS = 0.25
LAUNCH_COMPILE = 0.6
STEP_FIXED_S = 0.015  # data, logging, schedulers, synchronisation at the end of the step
