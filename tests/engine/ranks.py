"""Runs a function on several gloo ranks forked from this process, bounded in time.

Forking after the imports costs a tenth of a second per rank; spawning costs many. The parent must never compute with
torch itself (a fork of a process with OpenMP threads deadlocks), so references are computed inside rank 0.
"""

from __future__ import annotations

import datetime
import gc
import multiprocessing as mp
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # costs each rank 1.6 s when it is not imported before the fork
import torch.distributed as dist


def run(world: int, work: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """`work(rank, world, *args)` on every rank: the results by rank, or the first rank's traceback as an error."""
    context = mp.get_context("fork")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=_rank, args=(rank, world, work, args, store, results, timeout), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            return _collect(world, results, time.monotonic() + timeout)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.join(0.5)
                process.kill()
                process.join()


def _collect(world: int, results: Any, deadline: float) -> list[Any]:
    done: dict[int, Any] = {}
    while len(done) < world:
        try:
            rank, error, value = results.get(timeout=max(deadline - time.monotonic(), 0.1))
        except queue.Empty:
            missing = sorted(set(range(world)) - set(done))
            raise TimeoutError(f"ranks {missing} did not answer in time") from None
        if error:
            raise AssertionError(f"rank {rank} of {world} failed:\n{error}")
        done[rank] = value
    return [done[rank] for rank in range(world)]


def _rank(rank: int, world: int, work: Callable[..., Any], args: Any, store: str, results: Any, timeout: float) -> None:
    gc.freeze()  # what the parent left behind may belong to threads that a fork does not have
    try:
        torch.set_num_threads(1)
        torch.backends.mkldnn.set_flags(True)  # torch switches it off for good after one bf16 product it cannot do
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(store, world), timeout=limit)
        value = work(rank, world, *args)
        results.put((rank, None, value))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc()[-4000:], None))
    results.close()
    results.join_thread()
    os._exit(0)
