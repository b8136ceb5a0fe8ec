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
    "vocab_parallel": 10.0,  # bf16 logits, fp32 copy whose softmax is kept, gradient: SimuMax rows give 10.6
    "plain": 14.0,  # bf16 logits, fp32 copy, fp32 log-softmax, fp32 gradient
    "chunked": 14.0,  # the same for one chunk of tokens at a time
    "fused_linear": 14.0,  # the same for one chunk; the kernel never holds more
}
LOGIT_BYTES_BF16 = 6.0  # KempnerForge computes its loss on bf16 logits: logits, log-softmax, gradient
LOSS_CHUNKS = 8  # chunked losses cut the tokens into this many pieces
FUSED_CHUNK_TOKENS = 1024  # a fused linear cross-entropy works on about this many tokens at a time

# Backward of one layer holds its gradients beside its activations; about half of them are alive at once.
BACKWARD_WORKING_SET = 0.5
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
