"""Error messages of PyTorch, torchao, CUDA and NCCL, by the file that raises them."""

from __future__ import annotations

from meshwright.rules.messages.message import Table

TABLE: Table = {
    "pytorch/pytorch c10/cuda/CUDACachingAllocator.cpp": {
        "CUDA out of memory. Tried to allocate {}": "memory.peak memory.state memory.tight",
        "CUDA out of memory.": "memory.peak memory.state memory.tight",
        "HIP out of memory. Tried to allocate {}": "memory.peak memory.state memory.tight",
    },
    "pytorch/pytorch aten/src/ATen/cuda/CUDABlas.cpp": {
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "memory.peak memory.tight"
    },
    "pytorch/pytorch c10/cuda/CUDAException.cpp": {
        "CUDA error: no kernel image is available for execution on the device": "error.gpu-too-new-or-old",
        "CUDA error: device-side assert triggered": "error.index-out-of-range run.failed-gpu-fault",
        "CUDA error: an illegal memory access was encountered": "run.failed-gpu-fault",
        "CUDA error: operation not permitted when stream is capturing": "graphs.syncing-dispatch graphs.packing",
        "CUDA error: invalid device ordinal": "error.more-ranks-than-gpus",
        "CUDA error: uncorrectable ECC error encountered": "run.failed-gpu-fault",
    },
    "pytorch/pytorch c10/cuda/CUDAFunctions.cpp": {
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver": (
            "error.no-gpu"
        ),
        "No CUDA GPUs are available": "error.no-gpu",
        "The NVIDIA driver on your system is too old (found version {}).": "error.driver-too-old",
    },
    "pytorch/pytorch torch/cuda/__init__.py": {"Torch not compiled with CUDA enabled": "error.no-gpu"},
    "pytorch/pytorch aten/src/ATen/native/cuda/Indexing.cu": {
        "Assertion `srcIndex < srcSelectDimSize` failed.": "error.index-out-of-range",
        "Assertion `t >= 0 && t < n_classes` failed.": "error.index-out-of-range",
    },
    "pytorch/pytorch aten/src/ATen/native/cuda/IndexKernel.cu": {
        'Assertion `-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed.': (
            "error.index-out-of-range"
        )
    },
    "pytorch/pytorch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp": {
        "No available kernel. Aborting execution.": "kernels.attention-gpu"
    },
    "Dao-AILab/flash-attention csrc/flash_attn/flash_api.cpp": {
        "FlashAttention only supports Ampere GPUs or newer.": "kernels.attention-gpu",
        "FlashAttention only support fp16 and bf16 data type": "error.attention-dtype",
    },
    "pytorch/pytorch torch/_meta_registrations.py": {
        "Expected both dimensions of mat2 to be divisible by 16 but got {}": "precision.fp8-widths"
    },
    "pytorch/pytorch aten/src/ATen/native/cuda/Blas.cpp": {
        "Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: ({}x{}).": (
            "precision.fp8-widths"
        ),
        "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+": (
            "precision.fp8-gpu"
        ),
    },
    "pytorch/pytorch torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp": {
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType={}, NumelIn={}, NumelOut={}, "
        "Timeout(ms)={}) ran for {} milliseconds before timing out.": "run.failed-hang",
        "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU "
        "operations might run on corrupted/incomplete data.": "run.failed-hang",
        "NCCL communicator was aborted on rank {}.": "run.failed-hang error.nccl-remote",
        "[Rank {}] {} failure detected by watchdog at work sequence id: {} PG status: last enqueued work: {}, last "
        "completed work: {}": "run.failed-hang",
        "Received a dump signal due to a collective timeout from rank {} and we will try our best to dump the debug "
        "info.": "run.failed-hang",
        "To avoid data inconsistency, we are taking the entire process down.": "run.failed-hang",
    },
    "pytorch/pytorch torch/csrc/distributed/c10d/NCCLUtils.cpp": {
        "ncclUnhandledCudaError: Call to CUDA function failed.": "error.nccl-cuda",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.": (
            "error.nccl-system"
        ),
        "ncclInternalError: Internal check failed.": "error.nccl-internal",
        "ncclInvalidArgument: Invalid value for an argument.": "error.nccl-usage",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.": "error.nccl-usage",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.": (
            "error.nccl-remote run.failed-network"
        ),
        "NCCL timeout in communicator initialization.": "error.nccl-remote run.failed-network",
    },
    "NVIDIA/nccl src/init.cc": {
        "unhandled system error": "error.nccl-system run.failed-network",
        "unhandled cuda error": "error.nccl-cuda",
        "internal error - please report this issue to the NCCL developers": "error.nccl-internal",
        "invalid usage (run with NCCL_DEBUG=WARN for details)": "error.nccl-usage",
        "remote process exited or there was a network error": "error.nccl-remote run.failed-network",
        "Duplicate GPU detected : rank {} and rank {} both on CUDA device {}": "error.more-ranks-than-gpus",
    },
    "NVIDIA/nccl src/transport/net_ib.cc": {
        "NET/IB : Got completion from peer {} with status={} opcode={} len={} vendor err {}": "run.failed-network",
        "NET/IB : Got completion with error {}, opcode {}, len {}, vendor err {}": "run.failed-network",
        "NET/IB : No IP interface found.": "error.no-network-interface",
        "NET/IB : Unable to open device {}": "error.infiniband-setup",
        "NET/IB : {} async fatal event: {}": "run.failed-network",
    },
    "NVIDIA/nccl src/misc/ibvwrap.cc": {
        "ibv_modify_qp failed with error {}": "error.infiniband-setup",
        "ibv_modify_qp failed with {} {}": "error.infiniband-setup",
        "ibv_reg_mr failed with error {}": "error.nccl-system",
        "ibv_create_qp failed with error {}": "error.infiniband-setup",
        "ibv_create_qp failed with error Cannot allocate memory": "error.locked-memory",
        "ibv_create_cq failed with error Cannot allocate memory": "error.locked-memory",
        "ibv_reg_mr failed with error Cannot allocate memory": "error.locked-memory",
    },
    "NVIDIA/nccl src/misc/socket.cc": {
        "socketProgress: Connection closed by remote peer {}": "error.peer-closed",
        "Net : Connection closed by remote peer {}": "error.peer-closed",
        "Net : Call to recv from {} failed : {}": "error.peer-closed",
    },
    "NVIDIA/nccl src/bootstrap.cc": {"Bootstrap : no socket interface found": "error.no-network-interface"},
    "NVIDIA/nccl src/transport/nvls.cc": {
        "Failed to bind NVLink SHARP (NVLS) Multicast memory of size {} : CUDA error {} {}": "error.nvls"
    },
    "NVIDIA/open-gpu-kernel-modules src/common/sdk/nvidia/inc/nverror.h": {
        "GPU has fallen off the bus": "error.xid-79",
        "NVLink Error": "error.xid-74",
        "Contained ECC error": "error.xid-94",
        "Uncontained ECC error": "error.xid-95",
    },
    "NVIDIA/nccl src/misc/shmutils.cc": {
        "Error while creating shared memory segment {} (size {})": "error.shared-memory"
    },
    "pytorch/pytorch torch/csrc/distributed/c10d/socket.cpp": {
        "The client socket has timed out after {} while trying to connect to ({}, {}).": "error.rendezvous",
        "The client socket has failed to connect to any network address of ({}, {}).": "error.rendezvous",
        "The server socket has failed to listen on any local network address. port: {}, useIpv6: {}, code: {}, name: "
        "EADDRINUSE, message: address already in use": "error.port-in-use",
    },
    "pytorch/pytorch torch/distributed/rendezvous.py": {
        "Error initializing torch.distributed using env:// rendezvous: environment variable {} expected, but not set": (
            "error.not-launched"
        )
    },
    "pytorch/pytorch torch/distributed/distributed_c10d.py": {
        "Default process group has not been initialized, please make sure to call init_process_group.": (
            "error.not-launched"
        )
    },
    "pytorch/pytorch torch/distributed/device_mesh.py": {
        "Mesh should not be bigger than default world size {}, but found {} ranks!": "topology.shard-product"
    },
    "pytorch/pytorch torch/distributed/fsdp/_fully_shard/_fsdp_param.py": {
        "FSDP does not support uneven sharding on dim {}: {} (world size: {})": "error.uneven-sharding"
    },
    "pytorch/pytorch torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py": {
        "FSDP expects uniform original parameter dtype but got {}": "error.mixed-dtypes",
        "FSDP parameters should be materialized from meta device before training, but the following were still on meta "
        "device: {}": "error.meta-parameters",
        "FSDP parameters should be materialized on CPU when enabling CPU offloading.": "error.offload-device",
    },
    "pytorch/pytorch torch/distributed/fsdp/_flat_param.py": {
        "Must flatten tensors with uniform dtype but got {} and {}": "error.mixed-dtypes",
        "Cannot flatten integer dtype tensors": "error.integer-weights",
        "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`": "error.orig-params",
    },
    "pytorch/pytorch torch/distributed/fsdp/_init_utils.py": {
        "Inconsistent compute device and `device_id` on rank {}: {} vs {}": "error.more-ranks-than-gpus"
    },
    "pytorch/pytorch torch/distributed/pipelining/schedules.py": {
        "Number of microbatches ({}) must be greater than or equal to the number of stages ({}).": (
            "schedule.micro-batches"
        ),
        "Interleaved 1F1B requires the number of microbatches to be a multiple of the number of rounds ({}), but got "
        "{}.": "schedule.micro-batch-rounds",
        "Zero bubble requires the number of microbatches to be a multiple of the number of rounds ({}), but got {}.": (
            "schedule.micro-batch-rounds"
        ),
        "ZBV requires exactly 2 stages per rank, but got {}.": "schedule.v-shaped",
        "DualPipeV requires at least as many microbatches as stages, but got {} microbatches and {} stages.": (
            "schedule.dualpipe-micro-batches"
        ),
        "The {} schedule is not supported with stage modules that have used torch.compile. Found OptimizedModule in "
        "{}": "schedule.compiled-split-backward",
    },
    "pytorch/pytorch torch/distributed/pipelining/stage.py": {
        "Pipeline group size {} cannot be larger than number of stages {}": "pipeline.more-stages-than-layers"
    },
    "pytorch/pytorch torch/distributed/pipelining/microbatch.py": {
        "Tensor size {} is smaller than num_chunks": "schedule.micro-batches"
    },
    "pytorch/pytorch torch/csrc/distributed/c10d/reducer.cpp": {
        "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates "
        "that your module has parameters that were not used in producing loss.": "error.unused-parameters",
        "DDP expects same model across all ranks, but Rank {} has {} params, while rank {} has inconsistent {} "
        "params": "error.ranks-differ",
    },
    "pytorch/pytorch torch/csrc/autograd/saved_variable.cpp": {
        "Trying to backward through the graph a second time (or directly access saved tensors after they have already "
        "been freed).": "recompute.ops-zero-bubble"
    },
    "pytorch/pytorch torch/_functorch/_aot_autograd/runtime_wrappers.py": {
        "This backward function was compiled with non-empty donated buffers which requires create_graph=False and "
        "retain_graph=False.": "schedule.compiled-split-backward"
    },
    "pytorch/pytorch torch/csrc/autograd/variable.cpp": {
        "element {} of tensors does not require grad and does not have a grad_fn": (
            "error.frozen-inputs peft.no-targets vision.nothing-trained"
        )
    },
    "pytorch/pytorch torch/utils/checkpoint.py": {
        "torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than during the "
        "forward pass.": "error.recompute-differs",
        "torch.utils.checkpoint: A different number of tensors was saved during the original forward and "
        "recomputation.": "error.recompute-differs",
    },
    "pytorch/pytorch torch/optim/optimizer.py": {
        "optimizer got an empty parameter list": "peft.no-targets vision.nothing-trained"
    },
    "pytorch/pytorch torch/nn/modules/module.py": {
        "size mismatch for {}: copying a param with shape {} from checkpoint, the shape in current model is {}.": (
            "error.checkpoint-shapes"
        ),
        "Error(s) in loading state_dict for {}: Missing key(s) in state_dict: {}": "error.checkpoint-keys",
        "Unexpected key(s) in state_dict: {}": "error.checkpoint-keys",
    },
    "pytorch/pytorch torch/distributed/checkpoint/default_planner.py": {
        "Missing key in checkpoint state_dict: {}.": "error.checkpoint-keys"
    },
    "pytorch/pytorch torch/utils/data/dataloader.py": {
        "DataLoader worker (pid(s) {}) exited unexpectedly": "run.failed-host-memory"
    },
    "pytorch/pytorch torch/csrc/DataLoader.cpp": {
        "DataLoader worker (pid {}) is killed by signal: Killed.": "run.failed-host-memory",
        "Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).": (
            "error.shared-memory"
        ),
    },
    "pytorch/pytorch aten/src/ATen/TensorIterator.cpp": {
        "Expected all tensors to be on the same device, but found at least two devices, {} and {}!": (
            "error.two-devices"
        )
    },
    "pytorch/pytorch aten/src/ATen/native/Embedding.cpp": {
        "index out of range in self": "error.index-out-of-range sequence.position-table"
    },
    "python/cpython Objects/exceptions.c": {
        "[Errno 28] No space left on device": "run.failed-disk-full",
        "[Errno 122] Disk quota exceeded": "run.failed-disk-full",
        "[Errno 24] Too many open files": "error.open-files",
    },
}
"""File → message → what it means: ids of rules, findings of the doctor or known errors, best first."""
