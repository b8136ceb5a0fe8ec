"""Messages of torchtitan, NeMo AutoModel, DeepSpeed, Hugging Face libraries, Unsloth and Python, by source file."""

from __future__ import annotations

from meshwright.rules.messages.message import Table

TABLE: Table = {
    "pytorch/torchtitan torchtitan/distributed/parallel_dims.py": {
        "Invalid parallel dims: dp_replicate({}) * dp_shard({}) * cp({}) * tp({}) * pp({}) != WORLD_SIZE({})": (
            "topology.shard-product topology.world"
        ),
        "expert_parallel_degree ({}) must divide dp_shard * cp * tp ({})": "topology.expert-shard-group",
        "dp_shard must -1 or >=1.": "topology.shard-product",
    },
    "pytorch/torchtitan torchtitan/distributed/pipeline_parallel.py": {
        "Number of stages ({}) cannot be greater than effective layers ({})": "pipeline.more-stages-than-layers",
        "Configuration would result in empty stages. With {} stages and {} effective layers": (
            "pipeline.more-stages-than-layers"
        ),
        "Number of virtual stages ({}) must be divisible by pipeline parallel size ({}).": "pipeline.stage-count",
        "Single stage schedule requires exactly 1 stage per rank, but got {} stages per rank.": "schedule.one-chunk",
        "Multi-stage schedule requires at least 2 stages per rank, but got {} stages per rank.": (
            "schedule.several-chunks"
        ),
        "v schedules assume 2 stages per rank, got {}": "schedule.v-shaped",
    },
    "pytorch/torchtitan torchtitan/models/common/decoder.py": {
        "tensor_parallel_degree ({}) must divide n_heads ({}).": "heads.attention",
        "tensor_parallel_degree ({}) must divide n_kv_heads ({}).": "heads.kv-heads",
        "{}.num_experts ({}) must be divisible by expert_parallel_degree ({}).": "moe.experts-divide",
        "Weight tying is not supported with Pipeline Parallel.": "pipeline.tied-embeddings",
        "Context Parallel is not supported with ScaledDotProductAttention or VarlenAttention. Use FlexAttention or "
        "disable CP.": "sequence.attention-kernel",
        "Training sequence length {} exceeds attention RoPE maximum supported sequence length {}.": (
            "sequence.beyond-model"
        ),
    },
    "pytorch/torchtitan torchtitan/components/quantization/float8.py": {
        "Failed to swap to Float8Linear because float8 is only supported on NVIDIA SM89 or later, or AMD gfx942 "
        "(MI300) or later.": "precision.fp8-gpu",
        "torchao is not installed. Please install it to use float8 linear layers.": "error.torchao-missing",
    },
    "pytorch/torchtitan torchtitan/components/quantization/mx.py": {
        "MXFP8 is only supported on SM100 or later architectures": "precision.block-scaled-gpu"
    },
    "pytorch/torchtitan torchtitan/components/quantization/nvfp4.py": {
        "NVFP4 is only supported on SM100 or later architectures": "precision.block-scaled-gpu"
    },
    "pytorch/torchtitan torchtitan/config/configs.py": {
        "Async TP requires 'model' in --compile.components and --compile.enable": "overlap.async-tensor-parallel"
    },
    "pytorch/torchtitan torchtitan/components/tokenizer.py": {
        "Tokenizer path '{}' does not exist": "error.tokenizer-files",
        "No supported tokenizer files found in '{}'. Available files: {}.": "error.tokenizer-files",
    },
    "NVIDIA-NeMo/Automodel nemo_automodel/components/distributed/mesh_utils.py": {
        "world_size ({}) must be divisible by ({}) ({} = {})": "topology.world",
        "dp_size must be a multiple of dp_replicate_size": "topology.replicas-divide",
        "dp_replicate_size={} must be less than dp_size={} since DDP usecase is not supported by FSDP2": (
            "topology.pure-replication"
        ),
        "non_pp_size={} must be a multiple of ep_size={}": "topology.expert-mesh",
        "dp_replicate_size is only supported with FSDP2Config": "strategy.megatron-fsdp-dp-replicate",
    },
    "NVIDIA-NeMo/Automodel nemo_automodel/components/distributed/parallelizer.py": {
        "num_attention_heads ({}) must be divisible by TP size ({})": "heads.attention",
        "num_key_value_heads ({}) must be divisible by TP size ({})": "heads.kv-heads",
        "enable_async_tensor_parallel=True requires sequence_parallel=True": "overlap.async-tensor-parallel",
        "Sequence parallelism is not supported for NemotronHForCausalLM": "sequence_parallel.state-space",
    },
    "NVIDIA-NeMo/Automodel nemo_automodel/components/moe/parallelizer.py": {
        "Tensor parallelism not supported for custom MoE models": "moe.tensor-parallel-experts",
        "No safe tensor-parallel plan is registered for custom MoE model '{}' at tp_size={}.": (
            "moe.tensor-parallel-experts"
        ),
    },
    "deepspeedai/DeepSpeed deepspeed/runtime/config.py": {
        "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * "
        "world_size {} != {} * {} * {}": "batch.divides",
        "Micro batch size per gpu: {} has to be greater than 0": "batch.smaller-than-data-parallel",
        "Gradient accumulation steps: {} has to be greater than 0": "batch.smaller-than-data-parallel",
        "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided": "error.deepspeed-no-batch",
        "bfloat16 and fp16 modes cannot be simultaneously enabled": "error.two-precisions",
    },
    "deepspeedai/DeepSpeed deepspeed/runtime/pipe/engine.py": {
        "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism": "strategy.deepspeed-pipeline"
    },
    "deepspeedai/DeepSpeed deepspeed/runtime/pipe/module.py": {
        "num_stages ({}) must divide distributed world size ({})": "topology.world"
    },
    "deepspeedai/DeepSpeed deepspeed/runtime/engine.py": {
        "Type bf16 is not supported on your device.": "precision.bf16-gpu",
        "Type fp16 is not supported on your device.": "error.precision-device",
        'You are using an untested ZeRO Optimizer. Please add <"zero_allow_untested_optimizer": true> in the '
        "configuration file to use it.": "error.untested-zero-optimizer",
        "The checkpoint being loaded used a DP world size of {} but the current world size is {}.": (
            "error.checkpoint-world-size"
        ),
        "You are using ZeRO-Offload with a client provided optimizer ({}) which in most cases will yield poor "
        "performance.": "error.offload-client-optimizer",
        "MoE not supported with Stage 3": "error.deepspeed-moe-stage-3",
        "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage {}": (
            "error.deepspeed-no-sync"
        ),
    },
    "deepspeedai/DeepSpeed deepspeed/moe/layer.py": {
        "Number of experts ({}) should be divisible by expert parallel size ({})": "moe.experts-divide"
    },
    "huggingface/transformers src/transformers/training_args.py": {
        "At most one of fp16 and bf16 can be True, but not both": "error.two-precisions",
        "Your setup doesn't support bf16/gpu. You need to assign use_cpu if you want to train the model on CPU.": (
            "precision.bf16-gpu"
        ),
        # older releases
        "Your setup doesn't support bf16/gpu. You need Ampere+ GPU with cuda>=11.0": "precision.bf16-gpu",
        "--tf32 requires Ampere or a newer GPU arch, cuda>=11 and torch>=1.7": "error.tf32-gpu",
        "--load_best_model_at_end requires the save and eval strategy to match": "error.best-model-steps",
    },
    "huggingface/transformers src/transformers/trainer.py": {
        "The activation_checkpointing in FSDP config and the gradient_checkpointing in training arg can't be set to "
        "True simultaneously.": "error.two-recomputes",
        "Using fsdp only works in distributed training.": "error.not-launched",
        "Using --fsdp xxx together with --deepspeed is not possible, deactivate one of those flags.": (
            "error.fsdp-and-deepspeed"
        ),
        "Context parallelism is supported only with SDPA attention, you are using {}.": "sequence.attention-kernel",
        "The model did not return a loss from the inputs, only the following keys: {}. For reference, the inputs it "
        "received are {}.": "error.no-labels",
    },
    "huggingface/transformers src/transformers/trainer_utils.py": {
        "You cannot perform fine-tuning on purely quantized models. Please attach trainable adapters on top of the "
        "quantized model to correctly perform fine-tuning.": "error.quantized-without-adapters"
    },
    "huggingface/transformers src/transformers/quantizers/quantizer_bnb_4bit.py": {
        "Using `bitsandbytes` 4-bit quantization requires bitsandbytes: `pip install -U bitsandbytes>={}`": (
            "error.bitsandbytes-missing"
        ),
        # older releases
        "Using `bitsandbytes` 4-bit quantization requires the latest version of bitsandbytes: `pip install -U "
        "bitsandbytes`": "error.bitsandbytes-missing",
        "Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the quantized "
        "model.": "error.quantized-on-cpu",
    },
    "huggingface/transformers src/transformers/trainer_callback.py": {
        "EarlyStoppingCallback requires metric_for_best_model to be defined": "error.early-stopping",
        "EarlyStoppingCallback requires IntervalStrategy of steps or epoch": "error.early-stopping",
    },
    "huggingface/transformers src/transformers/integrations/deepspeed.py": {
        "Please correct the following DeepSpeed config values that mismatch TrainingArguments values: {} The easiest "
        "method is to set these DeepSpeed config values to 'auto'.": "error.deepspeed-auto"
    },
    "huggingface/transformers src/transformers/modeling_utils.py": {
        # older releases
        "FlashAttention2 has been toggled on, but it cannot be used due to the following error: the package "
        "flash_attn seems to be not installed.": "error.flash-attention-missing",
        "the package for FlashAttention2 doesn't seem to be installed.": "error.flash-attention-missing",
        "the package for FlashAttention3 doesn't seem to be installed.": "error.flash-attention-missing",
    },
    "huggingface/transformers src/transformers/tokenization_utils_base.py": {
        "Asking to pad but the tokenizer does not have a padding token.": "error.padding-token",
        "Unable to create tensor, you should probably activate truncation and/or padding with 'padding=True' "
        "'truncation=True' to have batched tensors with the same length.": "error.uneven-columns",
        "Cannot use chat template functions because tokenizer.chat_template is not set and no template argument was "
        "passed! For information about writing templates and setting the tokenizer.chat_template attribute, please see "
        "the documentation at {}": "error.chat-template",
    },
    "huggingface/transformers src/transformers/utils/hub.py": {
        "We couldn't connect to '{}' to load the files, and couldn't find them in the cached files.": (
            "error.model-files"
        ),
        # older releases
        "couldn't connect to '{}' to load this file, couldn't find it in the cached files and it looks like {} is not "
        "the path to a directory containing a file named {}.": "error.model-files",
        "You are trying to access a gated repo.": "error.gated-model",
        "{} is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'": (
            "error.model-files"
        ),
    },
    "unslothai/unsloth unsloth/models/rl.py": {
        "Unsloth: Model is in bfloat16 precision but you want to use float16 precision.": "error.unsloth-precision",
        "Unsloth: Model is in float16 precision but you want to use bfloat16 precision.": "error.unsloth-precision",
    },
    "unslothai/unsloth-zoo unsloth_zoo/device_type.py": {
        "Unsloth cannot find any torch accelerator? You need a GPU.": "error.unsloth-gpu",
        "Unsloth currently only works on NVIDIA, AMD and Intel GPUs.": "error.unsloth-gpu",
        # older releases
        "Unsloth currently only works on NVIDIA GPUs and Intel GPUs.": "error.unsloth-gpu",
    },
    "huggingface/accelerate src/accelerate/accelerator.py": {
        "You can't train a model that has been loaded with `device_map='auto'` in any distributed mode.": (
            "error.device-map"
        ),
        "You can't train a model that has been loaded in 8-bit or 4-bit precision on a different device than the one "
        "you're training on.": "error.device-map",
        "When using FSDP2, a model and optimizer must be passed together to `Accelerator.prepare()`": (
            "error.prepare-together"
        ),
        "bf16 mixed precision requires PyTorch >= 1.10 and a supported device.": "precision.bf16-gpu",
    },
    "python/cpython Objects/exceptions.c": {
        "'utf-8' codec can't decode byte {} in position {}: invalid start byte": "error.not-utf-8",
        "'utf-8' codec can't decode byte {} in position {}: invalid continuation byte": "error.not-utf-8",
    },
    "huggingface/datasets src/datasets/load.py": {
        "Dataset '{}' doesn't exist on the Hub or cannot be accessed.": "error.dataset-access",
        "Couldn't find any data file at {}.": "error.dataset-files",
    },
    "huggingface/peft src/peft/tuners/tuners_utils.py": {
        "Target modules {} not found in the base model. Please check the target modules and try again.": (
            "error.target-modules"
        ),
        "Please specify `target_modules` in `peft_config`": "peft.no-targets",
        "No modules were targeted for adaptation. This might be caused by a combination of mismatched target modules "
        "and excluded modules.": "peft.targets-of-the-model",
    },
}
"""File → message → what it means: ids of rules, findings of the doctor or known errors, best first."""
