"""Error messages of Megatron-LM, Megatron-Bridge and Transformer Engine, by the file that raises them."""

from __future__ import annotations

from meshwright.rules.messages.message import Table

TABLE: Table = {
    "NVIDIA/Megatron-LM megatron/training/arguments.py": {
        "world size ({}) is not divisible by total_model_size ({})": "topology.world",
        "seq-length should be a multiple of 2 * context-parallel-size if context-parallel-size > 1.": (
            "sequence.context-chunks"
        ),
        "max_position_embeddings ({}) must be greater than or equal to seq_length ({}).": "sequence.position-table",
        "number of layers of the model must be divisible pipeline model parallel size": "pipeline.even-split",
        "Number of layers should be divisible by the pipeline-model-parallel size": "pipeline.even-split",
        "number of layers per pipeline stage must be divisible number of layers per virtual pipeline stage": (
            "pipeline.even-split"
        ),
        "When interleaved schedule is used, pipeline-model-parallel size should be greater than 1": (
            "pipeline.chunks-need-stages"
        ),
        "The length of pipeline_model_parallel_layout must be divisible by pipeline_model_parallel_size "
        "(num_stages={}, args.pipeline_model_parallel_size={})": "pipeline.stage-count",
        "num_experts must be non None to use expert model parallelism": "moe.ep-needs-experts",
        "Number of experts should be a multiple of expert model parallel_size.": "moe.experts-divide",
        "--overlap-param-gather only supported with distributed optimizer, megatron fsdp, or dist_muon": (
            "overlap.gather-needs-sharding"
        ),
        "Must use --overlap-param-gather with --overlap-grad-reduce": "overlap.gather-needs-reduction",
        "--use-torch-fsdp2 is not supported with pipeline parallelism": "strategy.fsdp2-pp",
        "--use-torch-fsdp2 is not supported with expert parallelism": "strategy.fsdp2-ep",
        "--use-torch-fsdp2 requires --untie-embeddings-and-output-weights": "strategy.tied-fsdp2",
        "--use-torch-fsdp2 not supported with fp16 yet": "precision.fp16-fsdp2",
        "--use-torch-fsdp2 is not supported with MCore's distributed optimizer": "error.fsdp2-distributed-optimizer",
        "--use-torch-fsdp2 is not supported with gradient accumulation fusion": "error.fsdp2-accumulation-fusion",
        "--use-torch-fsdp2 requires --ckpt-format torch_dist or torch_dcp": "error.checkpoint-format",
        "Megatron-FSDP requires the `fsdp_dtensor` checkpointing format.": "error.checkpoint-format",
        "FSDP always requires CUDA_DEVICE_MAX_CONNECTIONS value large than one": "error.max-connections-fsdp",
        "FSDP requires CUDA_DEVICE_MAX_CONNECTIONS > 1 or unset.": "error.max-connections-fsdp",
        "Using tensor model parallelism or context parallelism require setting the environment variable "
        "CUDA_DEVICE_MAX_CONNECTIONS to 1": "error.max-connections",
        "--fp8-param-gather only supported with distributed optimizer, torch fsdp2, megatron fsdp, or inference mode": (
            "precision.gather-needs-sharding"
        ),
        "Tensor parallel communication/GEMM overlap can happen only when sequence parallelism is enabled": (
            "overlap.tensor-needs-sequence-parallel"
        ),
        "--no-check-for-nan-in-loss-and-grad should be set with --cuda-graph-impl=full_iteration for training.": (
            "graphs.nan-check"
        ),
        "--cuda-graph-modules must be empty when --cuda-graph-impl=full_iteration.": "graphs.full-iteration-scope",
        "Setting NCCL_GRAPH_REGISTER=0 to avoid illegal memory access when using CUDA Graph with "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.": "error.graphs-expandable-segments",
        "The optimizer cpu offload must be used in conjunction with `--use-precision-aware-optimizer`, as the hybrid "
        "device optimizer reuses the code path of this flag.": "offload.optimizer-strategy",
        "When `--fp8-param-gather` is enabled, the optimizer cpu offload must be used in conjunction with "
        "`--fp8-recipe delayed`.": "offload.optimizer-fp8",
        "Emerging optimizer does not support Torch-FSDP2 for now.": "optimizer.muon-sharded-parameters",
        "Emerging optimizer does not support Megatron-FSDP for now.": "optimizer.muon-sharded-parameters",
        "micro_batch_size must be 1 when using sequence packing. To increase compute per micro batch increase the "
        "sequence length.": "data.packing-micro-batch",
        "Unsupported compute capability for GroupedGEMM kernels.": "dispatch.grouped-gemm",
        "--hierarchical-context-parallel-sizes must be set when a2a+p2p is used in cp comm": "sequence.hierarchy",
        "can only specify one of lr-warmup-fraction and lr-warmup-iters": "error.two-warmups",
    },
    "NVIDIA/Megatron-LM megatron/core/transformer/transformer_config.py": {
        "num_attention_heads ({}) must be a multiple of tensor_model_parallel_size ({}).": "heads.attention",
        "num_query_groups ({}) must be a multiple or divisor of tensor_model_parallel_size ({}).": "heads.kv-groups",
        # older releases
        "num_query_groups ({}) must be a multiple of tensor_model_parallel_size ({}).": "heads.kv-groups",
        "self.linear_num_key_heads={} must be a multiple of (self.tensor_model_parallel_size={} * "
        "self.context_parallel_size={}).": "heads.gated-delta-context heads.gated-delta",
        "self.linear_num_value_heads={} must be a multiple of (self.tensor_model_parallel_size={} * "
        "self.context_parallel_size={}).": "heads.gated-delta-context heads.gated-delta",
        "Delayed scaling does not support first / last layer in BF16.": "precision.delayed-first-last",
        "Delayed scaling does not support moe_act and layernorm recompute for fp8.": "precision.delayed-recompute",
        "fp8_param must be used together with fp8 mode.": "precision.gather-needs-fp8",
        "num_moe_experts must be non None to use expert-parallel.": "moe.ep-needs-experts",
        "moe_expert_capacity_factor only works with aux_loss, seq_aux_loss, global_aux_loss or none load balancing": (
            "error.capacity-balancing"
        ),
        "Currently there is no support for Pipeline parallelism with CPU offloading": "offload.activations-pipeline",
        "CPU offloading does not work when activation recomputation is enabled": "offload.activations-recompute",
        "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage cannot be set at the same time with "
        "account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split": "pipeline.conflicting-splits",
        "pipeline_model_parallel_layout cannot be set with other pipeline layout arguments.": (
            "pipeline.conflicting-splits"
        ),
        "num_layers: {} after enable account_for_embedding_in_pipeline_split or account_for_loss_in_pipeline_split "
        "must be divisible by pipeline_model_parallel_size {}": "pipeline.even-split",
        "number of layers at middle stage: {} must be divisible by the middle pipeline model parallel size {}": (
            "pipeline.even-split"
        ),
        "Bias in Moe is only supported when ETP==1": "moe.expert-bias",
        "moe_shared_expert_overlap only works with alltoall or flex token dispatcher.": (
            "dispatch.shared-overlap-nothing"
        ),
        "shared_experts recompute cannot work with --moe-shared-expert-overlap.": "dispatch.shared-overlap-recompute",
        "moe_act in recompute_modules is only supported with moe_grouped_gemm.": "recompute.expert-activation",
        "Invalid choices for recompute_modules: {}. Allowed modules are: {}": "recompute.ops-supported",
        "When using recompute_granularity: selective recompute_num_layers must be None.": (
            "recompute.layers-with-selective"
        ),
        "full recompute is only supported with full iteration CUDA graph.": "graphs.full-recompute",
        "cuda_graph_modules must not contain both moe and moe_router.": "graphs.experts-or-router",
        "moe_preprocess cuda graph is only supported with moe_router cuda graph.": "graphs.preprocess-needs-router",
        "moe cuda graph is only supported with drop-padding MoE.": "graphs.experts-need-capacity",
        "moe recompute is not supported with moe_router CUDA graph with: ": "graphs.router-recompute",
        "moe cuda graph is only supported for MoE.": "graphs.modules-of-the-model",
        "mlp cuda graph is only supported for dense layers, but not found in the model.": (
            "graphs.modules-of-the-model"
        ),
        'cuda_graph_modules must be empty when cuda_graph_impl="full_iteration".': "graphs.full-iteration-scope",
        "CUDA graphs not supported with CPU offloading.": "error.graphs-offload",
        "overlap_moe_expert_parallel_comm is only supported with expert model parallelism": "dispatch.overlap-ranks",
        "overlap_moe_expert_parallel_comm is supported with alltoall/flex token dispatcher": (
            "dispatch.overlap-dispatcher"
        ),
        "If enabling EP A2A overlap, virtual_pipeline_model_parallel_size must be specified when "
        "pipeline_model_parallel_size > 1": "dispatch.overlap-interleaving",
        "disable full recomputation when enabling overlap_moe_expert_parallel_comm": "dispatch.overlap-recompute",
        "disable moe in recompute_modules when enabling overlap_moe_expert_parallel_comm": (
            "dispatch.overlap-recompute"
        ),
        "disable moe_shared_expert_overlap when enabling overlap_moe_expert_parallel_comm": (
            "dispatch.overlap-shared-experts"
        ),
        "overlap_moe_expert_parallel_comm is only supported with bf16 or fp16 model": "dispatch.overlap-precision",
        "MTP supports at most one layer when enabling overlap_moe_expert_parallel_comm.": (
            "dispatch.overlap-prediction-layers"
        ),
        "Token dispatcher type: {} does not support variable sequence length, please use alltoall dispatcher "
        "instead.": "error.variable-length-dispatch",
    },
    "NVIDIA/Megatron-LM megatron/core/model_parallel_config.py": {
        "Cannot use sequence parallelism without tensor parallelism": "sequence_parallel.needs-tensor-parallel"
    },
    "NVIDIA/Megatron-LM megatron/core/parallel_state.py": {
        "world_size ({}) is not divisible by {}": "topology.world",
        "world_size ({}) is not divisible by expert_tensor_model_pipeline_parallel size ({})": "topology.expert-mesh",
        "pipeline_model parallel group is not initialized": "error.groups-not-initialized",
        "tensor model parallel group is not initialized": "error.groups-not-initialized",
        "data parallel group is not initialized": "error.groups-not-initialized",
        "pipeline-model-parallel size should be greater than 1 with interleaved schedule": (
            "pipeline.chunks-need-stages"
        ),
    },
    "NVIDIA/Megatron-LM megatron/core/num_microbatches_calculator.py": {
        "global batch size ({}) is not divisible by micro batch size ({}) times data parallel size ({})": (
            "batch.divides batch.smaller-than-data-parallel"
        ),
        "number of microbatches should be at least 1, got {}.": "batch.smaller-than-data-parallel batch.divides",
    },
    "NVIDIA/Megatron-LM megatron/core/utils.py": {
        "{} is not divisible by {}": "heads.ffn-width moe.expert-width heads.attention"
    },
    "NVIDIA/Megatron-LM megatron/core/transformer/module.py": {
        "CUDA graph accepts only Tensor inputs.": "graphs.packing"
    },
    "NVIDIA/Megatron-LM megatron/core/transformer/transformer_block.py": {
        "num_layers={} should be divisible by config.pipeline_model_parallel_size={}": "pipeline.even-split",
        "num_layers_per_pipeline_rank {} should be divisible by vp_size {}": "pipeline.even-split",
    },
    "NVIDIA/Megatron-LM megatron/core/transformer/transformer_layer.py": {
        "CUDA graph accepts only Tensor inputs. inference_context and packed_seq_params are excluded from input "
        "list.": "graphs.packing"
    },
    "NVIDIA/Megatron-LM megatron/core/transformer/cuda_graph_config.py": {
        "moe cuda graph is only supported with drop-padding MoE or transformer_engine sync-free HybridEP with rank "
        "capacity and paged stash.": "graphs.experts-need-capacity"
    },
    "NVIDIA/Megatron-LM megatron/core/transformer/cuda_graphs.py": {
        "RNG tracker does not support cudagraphs!": "graphs.random-states",
        "Cudagraphs received an arg of type {} which is not supported.": "graphs.packing",
    },
    "NVIDIA/Megatron-LM megatron/core/transformer/dot_product_attention.py": {
        "Context parallelism is only supported by TEDotProductAttention!": "sequence.attention-kernel",
        "Packed sequence is not supported by DotProductAttention. Please use TEDotProductAttention instead.": (
            "data.packing-unsupported"
        ),
    },
    "NVIDIA/Megatron-LM megatron/core/transformer/moe/moe_layer.py": {
        "During training, performance may degrade if MoE and tensor parallelism are enabled without also enabling "
        "sequence parallelism.": "sequence_parallel.required-by-moe"
    },
    "NVIDIA/Megatron-LM megatron/core/tensor_parallel/mappings.py": {
        "First dimension of the tensor should be divisible by tensor parallel size": "sequence.tensor-parts"
    },
    "NVIDIA/Megatron-LM megatron/core/ssm/mamba_mixer.py": {
        "nheads must be evenly divisble by tp_size": "heads.mamba",
        "ngroups must be evenly divisible by tp_size": "heads.mamba",
    },
    "NVIDIA/Megatron-LM megatron/core/ssm/mamba_context_parallel.py": {
        "nheads must be evenly divisible by tp_size * cp_size": "heads.mamba-context",
        "cp_size must be evenly divisible by ngroups/tp_size": "heads.mamba-context",
    },
    "NVIDIA/Megatron-LM megatron/core/optimizer/__init__.py": {
        "--use-precision-aware-optimizer only supported with distributed optimizer": "precision.bf16-moments",
        "{} optimizer is not supported.": "optimizer.supported",
    },
    "NVIDIA/Megatron-LM megatron/core/distributed/param_and_grad_buffer.py": {
        "found NaN in local grad norm for bucket #{} in backward pass before data-parallel communication collective": (
            "loss.not-a-number"
        )
    },
    "NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/training/config.py": {
        "Micro batch size should be 1 when training with packed sequence, but your micro batch size is {}.": (
            "data.packing-micro-batch"
        ),
        "When finetuning with CP>1, calculate_per_token_loss must be True": "sequence.loss-per-token",
        "world size ({}) is not divisible by total_model_size (model_cfg.tensor_model_parallel_size={} * "
        "model_cfg.pipeline_model_parallel_size={} * model_cfg.context_parallel_size={})": "topology.world",
    },
    "NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/models/gpt_provider.py": {
        "Transformer engine's RNG tracker is required for cudagraphs, it can be enabled with "
        "use_te_rng_tracker=True'.": "graphs.random-states"
    },
    "NVIDIA/TransformerEngine transformer_engine/pytorch/quantization.py": {
        "Device compute capability 8.9 or higher required for FP8 execution.": "precision.fp8-gpu",
        "Device compute capability 10.0 or higher required for MXFP8 execution.": "precision.block-scaled-gpu",
    },
}
"""File → message → what it means: ids of rules, findings of the doctor or known errors, best first."""
