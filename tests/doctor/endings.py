"""The last lines of failed runs, as torch, NCCL, the launcher and SLURM print them."""

from __future__ import annotations

import random

PLACES = {
    "logits": '  File "/src/train/losses.py", line 12, in cross_entropy_loss',
    "optimizer": '  File "/usr/lib/python3/torch/optim/adamw.py", line 200, in _init_group',
    "activations": '  File "/src/model/llama.py", line 301, in forward',
    "buffers": '  File "/usr/lib/python3/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", line 184, in '
    "foreach_all_gather",
    "weights": '  File "/usr/lib/python3/transformers/modeling_utils.py", line 4, in from_pretrained',
}
"""The part of memory that grows -> a line of the traceback."""


def out_of_memory(rng: random.Random, where: str = "activations", version: str = "2.6") -> tuple[str, ...]:
    """Return the traceback and the message of torch 1.13, 2.4 or later; 2.9 renamed the variable that it names."""
    rank, total = rng.randrange(8), 79.10
    wanted = rng.choice([0.5, 1.0, 2.0, 4.0])
    unused = round(rng.uniform(0.2, 1.2), 2)
    allocated = round(total - 1.0 - unused - rng.uniform(0.1, 0.4), 2)
    begin = f"[rank{rank}]: "
    name = "torch.OutOfMemoryError" if version != "2.4" else "torch.cuda.OutOfMemoryError"
    variable = "PYTORCH_ALLOC_CONF" if version == "2.9" else "PYTORCH_CUDA_ALLOC_CONF"
    if version == "1.13":
        text = (
            f"RuntimeError: CUDA out of memory. Tried to allocate {wanted:.2f} GiB (GPU {rank}; {total:.2f} GiB total "
            f"capacity; {allocated:.2f} GiB already allocated; 512.00 MiB free; {allocated + unused:.2f} GiB reserved "
            f"in "
            "total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to avoid "
            "fragmentation."
        )
    else:
        pools = ", with 120.00 MiB allocated in private pools (e.g., CUDA Graphs)" if version == "2.9" else ""
        text = (
            f"{name}: CUDA out of memory. Tried to allocate {wanted:.2f} GiB. GPU {rank} has a total capacity of "
            f"{total:.2f} GiB of which 312.88 MiB is free. Including non-PyTorch memory, this process has "
            f"{total - 0.31:.2f} GiB memory in use. Of the allocated memory {allocated:.2f} GiB is allocated by PyTorch"
            f"{pools}, and {unused:.2f} GiB is reserved by PyTorch but unallocated. If reserved but unallocated "
            f"memory is "
            f"large try setting {variable}=expandable_segments:True to avoid fragmentation."
        )
    return (f"{begin}Traceback (most recent call last):", f"{begin}{PLACES[where]}", f"{begin}{text}")


def fragmented(rng: random.Random) -> tuple[str, ...]:
    """Return an out-of-memory message with much memory that is reserved but not used."""
    unused = rng.uniform(6, 14)
    return (
        "[rank3]: Traceback (most recent call last):",
        f"[rank3]: {PLACES['activations']}",
        f"[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {rng.uniform(1, 3):.2f} GiB. GPU 3 "
        f"has a "
        "total capacity of 79.10 GiB of which 700.00 MiB is free. Including non-PyTorch memory, this process has 78.40 "
        f"GiB memory in use. Of the allocated memory {77.2 - unused:.2f} GiB is allocated by PyTorch, and "
        f"{unused:.2f} GiB "
        "is reserved by PyTorch but unallocated.",
    )


def timeout(rng: random.Random, late: int, world: int, version: str = "2.6") -> tuple[str, ...]:
    """Return the watchdog's lines of all ranks but those that died; the late rank has enqueued fewer collectives."""
    number = rng.randint(2_000, 90_000)
    lines = []
    for rank in range(world):
        begin = f"[rank{rank}]:[E304 05:06:07.{rng.randrange(10**9):09d} ProcessGroupNCCL.cpp:"
        group = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
        at = number - (1 if rank == late else 0)
        operation = "_ALLGATHER_BASE" if rank == late else "ALLREDUCE"
        lines.append(
            f"{begin}629] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={at}, OpType="
            f"{operation}, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600{rng.randrange(100):03d} "
            f"milliseconds "
            "before timing out."
        )
        enqueued = at if rank == late else number + 3
        if version == "2.4":
            lines.append(
                f"{begin}1785] [PG 0 Rank {rank}] Exception (either an error or timeout) detected by watchdog at work: "
                f"{at}, last enqueued NCCL work: {enqueued}, last completed NCCL work: {at - 1}."
            )
        else:
            lines.append(
                f"{begin}2168] {group}  failure detected by watchdog at work sequence id: {at} PG status: last "
                f"enqueued "
                f"work: {enqueued}, last completed work: {at - 1}"
            )
    return tuple(rng.sample(lines, len(lines)))


def silent(rng: random.Random, dead: int, world: int) -> tuple[str, ...]:
    """Return the watchdog's lines of all ranks but one, which reports nothing."""
    lines = [line for line in timeout(rng, -1, world) if not line.startswith(f"[rank{dead}]")]
    return tuple(lines)


def heartbeat(rng: random.Random) -> tuple[str, ...]:
    """Return what torch prints if its watchdog makes no progress itself."""
    return (
        f"[rank0]:[E304 05:06:07.{rng.randrange(10**9):09d} ProcessGroupNCCL.cpp:1484] [PG ID 0 PG GUID 0(default_pg) "
        f"Rank 0] "
        "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued "
        "collectives. "
        "This typically indicates a NCCL/CUDA API (e.g., CudaEventDestroy) hang blocking the watchdog, and could be "
        "triggered by another thread holding the GIL inside a CUDA api.",
    )


def flight_recorder(late: int) -> tuple[str, ...]:
    """Return a timeout with the analysis of torch's flight recorder."""
    return (
        "[rank0]:[E304 05:06:07.000000001 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation "
        "timeout: "
        "WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600010 milliseconds "
        "before timing out.",
        "Collective sequence number: 812",
        "collective info: nccl:all_reduce",
        f"missing ranks: {{{late}}}",
    )


def slurm(kind: str) -> tuple[str, ...]:
    """Return what SLURM prints as it ends a job."""
    at = "ON node012 CANCELLED AT 2026-03-04T09:00:00"
    texts = {
        "preemption": f"slurmstepd: error: *** JOB 4711 {at} DUE TO PREEMPTION ***",
        "time": f"slurmstepd: error: *** JOB 4711 {at} DUE TO TIME LIMIT ***",
        "node": f"slurmstepd: error: *** JOB 4711 {at} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
        "user": f"slurmstepd: error: *** STEP 4711.0 {at} ***",
        "oom": "slurmstepd: error: Detected 2 oom_kill events in StepId=4711.0. Some tasks have been OOM Killed.",
    }
    return (texts[kind],)


SIGTERM = (
    "W0304 05:06:07.123000 4711 torch/distributed/elastic/agent/server/api.py:753] Received 15 death signal, shutting "
    "down "
    "workers",
    "W0304 05:06:07.124000 4711 torch/distributed/elastic/multiprocessing/api.py:1029] Sending process 4801 closing "
    "signal "
    "SIGTERM",
    "Traceback (most recent call last):",
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 15",
)
"""torch's launcher after SIGTERM."""

DISK_FULL = (
    "[rank0]: Traceback (most recent call last):",
    '[rank0]:   File "/usr/lib/python3/torch/serialization.py", line 850, in save',
    "[rank0]: RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0",
    "[rank0]: OSError: [Errno 28] No space left on device",
)

RECOMPILE_LIMIT = (
    "W0304 05:06:07.123000 4711 torch/_dynamo/convert_frame.py:1995] [0/8] torch._dynamo hit config.recompile_limit "
    "(8)",
    "W0304 05:06:07.123000 4711 torch/_dynamo/convert_frame.py:1995] [0/8]    function: 'forward' "
    "(/src/model/llama.py:301)",
    "W0304 05:06:07.123000 4711 torch/_dynamo/convert_frame.py:1995] [0/8]    last reason: 0/7: tensor 'x' size "
    "mismatch at "
    "index 1. expected 4096, actual 3877",
)
"""torch.compile gives up on a function whose shapes change."""


def recompiled(number: int) -> tuple[str, ...]:
    """Return a line of TORCH_LOGS=recompiles."""
    begin = f"V0304 05:06:07.123000 4711 torch/_dynamo/guards.py:5389] [0/{number}] [__recompiles]"
    return (
        f"{begin} Recompiling function forward in /src/model/llama.py:301",
        f"{begin}     triggered by the following guard failure(s):",
        f"{begin}     - 0/0: tensor 'x' size mismatch at index 1. expected 4096, actual {3000 + number}",
    )


SCALE_AT_MINIMUM = (
    "[rank0]: Traceback (most recent call last):",
    '[rank0]:   File "/usr/lib/python3/deepspeed/runtime/fp16/loss_scaler.py", line 176, in update_scale',
    "[rank0]: Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
)
