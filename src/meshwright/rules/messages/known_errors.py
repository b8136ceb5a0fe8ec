"""Errors that no rule describes: of the environment, of files and of the launch, each with its cause and fix."""

from __future__ import annotations

from meshwright.rules.messages.codes import CODE_ERRORS
from meshwright.rules.messages.message import KnownError
from meshwright.rules.messages.own import OWN_ERRORS

KNOWN_ERRORS: dict[str, KnownError] = {
    "error.no-gpu": KnownError(
        "PyTorch sees no GPU: a CPU build of torch, no driver, or a container without GPU access",
        (
            "nvidia-smi shows whether the driver sees the GPUs",
            "python -c 'import torch; print(torch.version.cuda)' prints None for a CPU build: install a CUDA build",
            "start the container with --gpus all, or request GPUs from the scheduler",
        ),
    ),
    "error.driver-too-old": KnownError(
        "the NVIDIA driver is older than the CUDA version that torch was built for",
        ("update the driver", "install a torch build for an older CUDA version"),
    ),
    "error.gpu-too-new-or-old": KnownError(
        "torch, or an extension, was not built for the compute capability of this GPU",
        ("install a build that lists it in torch.cuda.get_arch_list()", "rebuild the extension on this machine"),
    ),
    "error.more-ranks-than-gpus": KnownError(
        "more ranks per node than visible GPUs, or every rank uses the same GPU",
        (
            "torchrun --nproc-per-node must be the number of GPUs of the node",
            "each rank must call torch.cuda.set_device(LOCAL_RANK) before the first collective",
            "check CUDA_VISIBLE_DEVICES",
        ),
    ),
    "error.index-out-of-range": KnownError(
        "a token id, label or position is outside the table it indexes: the tokenizer does not belong to the model, or "
        "the sequence is longer than the position table",
        (
            "CUDA_LAUNCH_BLOCKING=1 names the operation",
            "compare the tokenizer's length with the model's vocabulary size",
            "check that labels are -100 or below the vocabulary size",
        ),
    ),
    "error.attention-dtype": KnownError(
        "FlashAttention got fp32 tensors", ("train in bf16: precision.params=bf16", "kernels.attention=sdpa")
    ),
    "error.max-connections": KnownError(
        "on GPUs before Blackwell, tensor and context parallelism rely on one hardware queue for their launch order",
        ("export CUDA_DEVICE_MAX_CONNECTIONS=1",),
    ),
    "error.max-connections-fsdp": KnownError(
        "one hardware queue would serialize FSDP's gathers with compute", ("unset CUDA_DEVICE_MAX_CONNECTIONS",)
    ),
    "error.graphs-expandable-segments": KnownError(
        "NCCL registers buffers of CUDA graphs, which expandable segments may move",
        ("export NCCL_GRAPH_REGISTER=0", "drop expandable_segments from PYTORCH_CUDA_ALLOC_CONF"),
    ),
    "error.graphs-offload": KnownError(
        "a captured graph cannot contain transfers to host memory that the allocator decides on",
        ("kernels.cuda_graphs=none", "layout.offload=none"),
    ),
    "error.fsdp2-distributed-optimizer": KnownError(
        "FSDP2 shards the optimizer state itself", ("drop --use-distributed-optimizer",)
    ),
    "error.fsdp2-accumulation-fusion": KnownError(
        "the fused kernel writes into gradient buffers that FSDP2 does not have",
        ("add --no-gradient-accumulation-fusion",),
    ),
    "error.checkpoint-format": KnownError(
        "sharded parameters can be saved in some checkpoint formats only",
        ("--ckpt-format torch_dist with torch FSDP2", "--ckpt-format fsdp_dtensor with Megatron-FSDP"),
    ),
    "error.capacity-balancing": KnownError(
        "an expert capacity drops tokens, which only these balancing losses account for",
        ("--moe-router-load-balancing-type aux_loss", "drop --moe-expert-capacity-factor"),
    ),
    "error.variable-length-dispatch": KnownError(
        "this dispatcher needs the same number of tokens on every rank",
        ("layout.dispatcher=alltoall", "data.pad_to_max_length=true"),
    ),
    "error.two-warmups": KnownError(
        "the warmup is given twice, as a fraction and as a number", ("drop --lr-warmup-fraction or --lr-warmup-iters",)
    ),
    "error.two-precisions": KnownError(
        "fp16 and bf16 are both on", ("keep bf16, and turn fp16 off: bf16 needs no loss scale",)
    ),
    "error.precision-device": KnownError("the device does not support this number format", ("train in bf16 or fp32",)),
    "error.chat-template": KnownError(
        "the tokenizer has no chat template: a base model's folder, or chat_template.jinja was not copied",
        (
            "data.chat_template=FILE: a Jinja template, such as chat_template.jinja of the instruct model",
            "use the tokenizer of the instruct model (data.tokenizer=FOLDER)",
        ),
    ),
    "error.target-modules": KnownError(
        "target_modules names no linear layer of this model: names differ between model families",
        ("peft.targets=all-linear (target_modules='all-linear')", "names of layers: print(model)"),
    ),
    "error.tf32-gpu": KnownError("TF32 exists since Ampere", ("drop --tf32 on this GPU",)),
    "error.shared-memory": KnownError(
        "/dev/shm is too small: data workers and NCCL share tensors there",
        ("docker run --shm-size=16g, or --ipc=host", "data.workers=0"),
    ),
    "error.open-files": KnownError(
        "the process may not open more files: many shards or workers", ("ulimit -n 65536", "data.workers=2")
    ),
    "error.rendezvous": KnownError(
        "a rank cannot reach rank 0: wrong MASTER_ADDR or port, a firewall, or rank 0 ended before it listened",
        (
            "read the log of rank 0 first",
            "check that MASTER_ADDR resolves and MASTER_PORT is open from every node",
            "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that connects the nodes",
        ),
    ),
    "error.port-in-use": KnownError(
        "another process listens on the port, often a rank of an earlier run",
        ("torchrun --master-port 29501, or --rdzv-endpoint localhost:0", "end the processes of the earlier run"),
    ),
    "error.not-launched": KnownError(
        "the script was started as one plain process, without a launcher that sets RANK, WORLD_SIZE and MASTER_ADDR",
        ("torchrun --nproc-per-node 8 SCRIPT", "accelerate launch SCRIPT", "srun or mpirun with these variables set"),
    ),
    "error.uneven-sharding": KnownError(
        "a parameter's dimension is not a multiple of the ranks it is sharded over",
        ("choose a dp_shard that divides it", "pad the dimension"),
    ),
    "error.mixed-dtypes": KnownError(
        "FSDP shards the parameters of a module together, so they need one dtype",
        (
            "cast the model to one dtype before it is sharded",
            "quantized base weights: store them in the compute dtype (bnb_4bit_quant_storage=bfloat16)",
        ),
    ),
    "error.integer-weights": KnownError(
        "FSDP shards floating-point tensors, and the quantized weights are stored as integers",
        ("bnb_4bit_quant_storage=bfloat16, the dtype of the other parameters", "8-bit weights: train without FSDP"),
    ),
    "error.groups-not-initialized": KnownError(
        "Megatron's process groups were not created in this process, or two copies of Megatron are imported",
        (
            "call initialize_megatron() or parallel_state.initialize_model_parallel() first",
            "python -c 'import megatron; print(megatron.__path__)' must name one copy",
        ),
    ),
    "error.orig-params": KnownError(
        "FSDP1 flattens frozen and trained parameters together", ("fsdp_use_orig_params: true", "use FSDP2")
    ),
    "error.meta-parameters": KnownError(
        "the model was built on the meta device, and some parameters were never initialized or loaded",
        ("call to_empty() and initialize the weights, or load a checkpoint that contains the named parameters",),
    ),
    "error.offload-device": KnownError(
        "with CPU offload, parameters must be in host memory before training", ("load the state dict on the CPU",)
    ),
    "error.unused-parameters": KnownError(
        "DDP waits for the gradient of every parameter, but some did not take part in the loss",
        ("freeze them, or remove them from the model", "DistributedDataParallel(…, find_unused_parameters=True)"),
    ),
    "error.unsloth-precision": KnownError(
        "Unsloth's trainer computes in the format in which the model was loaded: dtype=None of from_pretrained is bf16 "
        "on every GPU that has it (Ampere and later), else fp16",
        (
            "fp16=False and bf16=True for a model in bf16, fp16=True and bf16=False for one in fp16",
            "fp16=not is_bfloat16_supported(), bf16=is_bfloat16_supported() follows the GPU (from unsloth import "
            "is_bfloat16_supported)",
        ),
    ),
    "error.frozen-inputs": KnownError(
        "recompute with a frozen embedding: the input of the first layer needs no gradient",
        ("model.enable_input_require_grads()", "use_reentrant=False"),
    ),
    "error.ranks-differ": KnownError(
        "ranks build different models: another config, checkpoint or seed-dependent structure on some",
        ("start every rank with the same config", "check that all nodes see the same files"),
    ),
    "error.recompute-differs": KnownError(
        "the recomputed forward pass is not the same as the first: it depends on state, on randomness or on autocast",
        (
            "turn off recompute for the named module",
            "compile the layer inside the checkpoint, not outside",
            "do not change module attributes in forward",
        ),
    ),
    "error.checkpoint-shapes": KnownError(
        "the checkpoint belongs to a model of other dimensions: another size, vocabulary padding or adapter rank",
        (
            "train the model that the checkpoint was saved from",
            "compare vocabulary sizes: Megatron pads them (--make-vocab-size-divisible-by)",
        ),
    ),
    "error.checkpoint-keys": KnownError(
        "names differ: another model or format, a checkpoint of adapters only, or a wrapper's prefix",
        ("convert the checkpoint to the format that is loaded", "check the prefix: module., _orig_mod., base_model."),
    ),
    "error.checkpoint-world-size": KnownError(
        "ZeRO saves one optimizer shard per rank and cannot load them on another number of ranks",
        ("resume on the same number of GPUs", "convert it to a universal checkpoint: ds_to_universal.py"),
    ),
    "error.two-devices": KnownError(
        "tensors of one operation are on different devices: a buffer or input was not moved",
        ("move the batch and all buffers to the rank's device",),
    ),
    "error.torchao-missing": KnownError("float8 training needs torchao", ("pip install torchao",)),
    "error.flash-attention-missing": KnownError(
        "flash_attention_2 was requested, but flash-attn is not installed",
        ("attn_implementation=sdpa needs no package", "pip install flash-attn --no-build-isolation"),
    ),
    "error.tokenizer-files": KnownError(
        "the folder does not contain the tokenizer", ("download it first: tokenizer.json is the file that is read",)
    ),
    "error.padding-token": KnownError(
        "the tokenizer has no padding token", ("tokenizer.pad_token = tokenizer.eos_token",)
    ),
    "error.no-labels": KnownError(
        "the batches have no labels, so that the model computes no loss",
        (
            "data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False) copies input_ids to labels",
            "or add a column labels to the dataset, with -100 for tokens outside the loss",
        ),
    ),
    "error.uneven-columns": KnownError(
        "samples of a batch have different lengths, or a column holds texts or lists that are no tensor",
        (
            "remove the columns of texts: dataset.map(tokenize, remove_columns=dataset.column_names)",
            "DataCollatorForSeq2Seq(tokenizer) pads labels too; DataCollatorForLanguageModeling writes its own",
        ),
    ),
    "error.bitsandbytes-missing": KnownError(
        "4-bit weights and 8-bit optimizers need bitsandbytes: it is not installed in the environment that runs, or "
        "too old",
        ("pip install -U bitsandbytes", "restart the notebook's runtime after installing"),
    ),
    "error.quantized-on-cpu": KnownError(
        "the quantized model does not fit into the free memory of the GPU, and device_map=auto put layers elsewhere",
        ("nvidia-smi lists other processes on the GPU; restart the notebook's runtime", "train a smaller model"),
    ),
    "error.quantized-without-adapters": KnownError(
        "weights in 4 or 8 bits cannot be updated; only adapters on them can",
        ("peft_config=LoraConfig(…) of SFTTrainer, or model = get_peft_model(model, LoraConfig(…))",),
    ),
    "error.unsloth-gpu": KnownError(
        "Unsloth found no GPU: torch was installed without CUDA, the driver is not visible, or there is none",
        (
            "torch.cuda.is_available() must be True; torch.version.cuda is None for a build without CUDA",
            "Colab: Runtime > Change runtime type > a GPU",
        ),
    ),
    "error.not-utf-8": KnownError(
        "a text file, such as a CSV of Excel, is not in UTF-8",
        ("iconv -f WINDOWS-1252 -t UTF-8 FILE > FILE_utf8", 'load_dataset("csv", data_files=FILE, encoding="cp1252")'),
    ),
    "error.dataset-access": KnownError(
        "the hub has no such dataset, or it is private or gated and the token has no access",
        ("check the name, with its owner: tatsu-lab/alpaca", "private or gated: hf auth login, and accept its terms"),
    ),
    "error.dataset-files": KnownError(
        "the path is neither a folder with data files nor a dataset's name",
        ('load_dataset("csv", data_files="FILE.csv") reads a file of this machine', "check the working directory"),
    ),
    "error.model-files": KnownError(
        "the model is neither a local folder with config.json nor a name on the hub, or the hub cannot be reached",
        ("check the path or the name", "on nodes without internet: download it first, then HF_HUB_OFFLINE=1"),
    ),
    "error.gated-model": KnownError(
        "the model's licence must be accepted on the hub",
        ("accept it on the model's page, then log in: hf auth login",),
    ),
    "error.device-map": KnownError(
        "device_map=auto spreads one copy of the model over the GPUs; a distributed run needs one copy per rank",
        ("drop device_map", 'quantized models: device_map={"": LOCAL_RANK}'),
    ),
    "error.prepare-together": KnownError(
        "FSDP2 replaces the parameters, so the optimizer must be built from the wrapped model",
        ("model, optimizer = accelerator.prepare(model, optimizer)",),
    ),
    "error.two-recomputes": KnownError(
        "activations would be recomputed twice",
        ("gradient_checkpointing: false, and keep fsdp_activation_checkpointing",),
    ),
    "error.fsdp-and-deepspeed": KnownError("both shard the model", ("drop --fsdp or --deepspeed",)),
    "error.best-model-steps": KnownError(
        "the best model can only be reloaded if it was saved when it was evaluated",
        ("set save_strategy and eval_strategy alike, and save_steps to a multiple of eval_steps",),
    ),
    "error.early-stopping": KnownError(
        "early stopping compares a metric between evaluations",
        ("set eval_strategy to steps or epoch, and metric_for_best_model: eval_loss",),
    ),
    "error.deepspeed-auto": KnownError(
        "the DeepSpeed config and the trainer's arguments set the same thing differently",
        ('write "auto" for these values in the DeepSpeed config',),
    ),
    "error.deepspeed-no-batch": KnownError(
        "the DeepSpeed config has no batch size", ('"train_micro_batch_size_per_gpu": 1',)
    ),
    "error.untested-zero-optimizer": KnownError(
        "ZeRO was not tested with this optimizer class", ('"zero_allow_untested_optimizer": true',)
    ),
    "error.offload-client-optimizer": KnownError(
        "the program passes an optimizer of its own, and DeepSpeed runs only its own on offloaded states",
        (
            '"optimizer": {"type": "AdamW", "params": {"lr": …}} in the DeepSpeed config, and none in the program',
            "deepspeed.ops.adam.DeepSpeedCPUAdam in the program",
            '"zero_force_ds_cpu_optimizer": false runs the program\'s optimizer on the CPU, slowly',
        ),
    ),
    "error.deepspeed-moe-stage-3": KnownError(
        "DeepSpeed's MoE layers shard experts themselves", ('"zero_optimization": {"stage": 2}',)
    ),
    "error.deepspeed-no-sync": KnownError(
        "ZeRO-2 and ZeRO-3 reduce gradients in every micro batch",
        ('"zero_optimization": {"stage": 1} with gradient accumulation', "do not call no_sync"),
    ),
    "error.locked-memory": KnownError(
        "InfiniBand could not lock memory: the limit of locked memory (memlock) is too low for its queues and buffers",
        (
            "ulimit -l unlimited before the ranks start; ulimit -l inside the job shows what they have",
            "SLURM: PropagateResourceLimitsExcept=MEMLOCK in slurm.conf, and LimitMEMLOCK=infinity for slurmd",
            "containers: --ulimit memlock=-1",
        ),
        fault="network",
    ),
    "error.infiniband-setup": KnownError(
        "an InfiniBand or RoCE connection could not be set up: the nodes' ports cannot reach each other, or use "
        "different GIDs",
        (
            "NCCL_IB_HCA chooses the ports: list only those of the training network",
            "RoCE: NCCL_IB_GID_INDEX must name a RoCEv2 GID on every node (show_gids)",
            "NCCL_IB_DISABLE=1 uses sockets, to see whether InfiniBand is the cause",
        ),
        fault="network",
    ),
    "error.no-network-interface": KnownError(
        "NCCL found no network interface that it may use",
        ("NCCL_SOCKET_IFNAME=eth0 names the interface (ip addr lists them)", "containers need the host's network"),
        fault="network",
    ),
    "error.peer-closed": KnownError(
        "the other rank closed the connection: it ended, mostly with an error of its own",
        ("find the rank that ended first and read its log", "memory killed it: dmesg | grep -i oom on its node"),
        fault="network",
    ),
    "error.nvls": KnownError(
        "NVLink SHARP could not be set up: Fabric Manager or an NVSwitch is not in order",
        ("NCCL_NVLS_ENABLE=0 trains without it", "systemctl status nvidia-fabricmanager on the node"),
        fault="gpu_fault",
    ),
    **CODE_ERRORS,
    **OWN_ERRORS,
}
"""Id → cause and fix."""
