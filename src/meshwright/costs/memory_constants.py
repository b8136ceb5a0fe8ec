"""Constants of the memory model that no engine determines, each with its reason; engines are in memory_profiles."""

from __future__ import annotations

# CUDA context, kernels and cuBLAS workspaces: 0.5-1 GB context plus 32 MiB workspaces per stream on Hopper.
CONTEXT_GIB = 0.9
# NCCL channels and proxies of one process group of size > 1 (buffers of 4 MiB x channels, both directions).
COMMUNICATOR_GIB = 0.15
# The allocator releases cached blocks before it fails, except for this share.
FRAGMENTATION_FLOOR = 0.02
# A plan fits if this share of the GPU stays free: the driver and other processes use some, and step 2 peaks higher.
RESERVE = 0.02

# Host memory beyond offloaded tensors: torch rounds every pinned block up to a power of two (weights are pinned).
HOST_MARGIN = 1.1

LOSS_CHUNKS = 8  # chunks of a chunked loss
FUSED_CHUNK_TOKENS = 1024  # tokens per chunk of a fused linear cross-entropy

# Sharded weights: the current layer and the prefetched one are gathered.
GATHERED_LAYERS = 2.0
# Bytes per score of attention that materializes its matrix: fp32 scores and softmax of torch, Megatron's fused softmax
# in 16 bits (5 with the mask of a dropout, as in Korthikanti et al. 2022).
SCORE_BYTES = {"eager": 8.0, "fused_softmax": 4.0}
# Share of the sequence that is image tokens when samples carry images of any size.
IMAGE_SHARE = 0.5
IMAGES_PER_SAMPLE = 4  # of a packed sample, one per document; others have one
# Tokens between stored states of a chunked scan (Mamba-2 256, gated delta rule 64).
MAMBA_CHUNK = 256
OWN_CHUNK = 128  # of our own scan, which saves states only per block of chunks
DELTA_CHUNK = 64
# NF4: half a byte and one fp32 scale per 64 weights, itself quantized.
NF4_BYTES = 0.516
# LLM.int8: one byte, and one fp32 scale per row.
INT8_BYTES = 1.001
FROZEN_BYTES = {"qlora": NF4_BYTES, "lora8bit": INT8_BYTES}
"""Bytes per frozen weight of the layers' matrices, by adapter method; others keep them in the compute format."""

# Half-width of the 80 per cent error band of the total, in per cent: the 80th percentile of the residuals over
# published peaks of the two better tiers, rounded up.
MEMORY_BANDS = {
    "dense": 10.0,  # 118 peaks of 10 sources; 4.4 over the better 62
    "moe": 10.0,  # 23 peaks of 4 sources
    "low_precision": 15.0,  # 11 peaks of 3 sources
    "hybrid": 20.0,  # 4 peaks of 2 sources
    "peft": 25.0,  # 4 peaks of one source
    "unmeasured": 35.0,  # fp4, diffusion, images, GPUs without published runs: a guess
}
