"""Fake runs for tests, written in any of the log formats that the doctor reads."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from meshwright import clusters, costs
from meshwright.planner import case_of, with_engine_strategy
from meshwright.recipes import index
from meshwright.recipes.case import Case, model_of

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 1.10 GiB is free. Including non-PyTorch memory, this process has 77.90 GiB memory in use. Of the "
    "allocated memory 75.00 GiB is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated."
)
OLD_OOM = (
    "RuntimeError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 3; 79.15 GiB total capacity; 70.00 GiB "
    "already allocated; 200.00 MiB free; 78.00 GiB reserved in total by PyTorch)"
)


@dataclass(frozen=True)
class FakeStep:
    """One step of a fake run."""

    step: int
    seconds: float
    loss: float
    lr: float = 3e-4
    grad_norm: float = 1.0
    memory_gib: float = 60.0
    data_s: float = 0.0
    collectives_s: float | None = None
    ranks_apart: float = 1.02
    loss_scale: float = 1.0
    skipped: int = 0
    bad: int = 0
    saved_s: float = 0.0  # blocked by a checkpoint after it
    validation: float | None = None  # loss of a validation after it
    epoch: float = 0.0
    aux_loss: float | None = None  # of a mixture of experts
    samples: int = 0  # if the batch size changes
    pause_s: float = 0.0  # an evaluation or a wait inside the time of its line
    waited_s: float = 0.0  # of a checkpoint before it, in formats whose step times include it
    lines: tuple[str, ...] = ()  # after it


@dataclass(frozen=True)
class FakeRun:
    """A run: where it ran, the steps of every start, and its final log lines."""

    starts: tuple[tuple[FakeStep, ...], ...]
    world: int = 8
    gpu: str = "H100"
    seq_length: int = 4096
    samples: int = 64
    total: int = 1000
    retries: int = 0
    final_lines: tuple[str, ...] = ()
    settings: dict[str, object] | None = None
    notes: dict[str, str] = field(default_factory=dict)
    tp: int = 1
    pp: int = 1
    cp: int = 1
    warmup: int = 20
    log_every: int = 1  # steps of a log line
    base_s: float = 2.0  # of a usual step
    slow_rank: int | None = None
    fp8: bool = False
    model: str = ""  # as torchtitan names it
    states_world: bool = True
    arguments: dict[str, object] = field(default_factory=dict)  # Megatron's
    first_lines: tuple[str, ...] = ()

    @property
    def data_ranks(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def tokens(self) -> int:
        return self.seq_length * self.samples

    def tokens_per_s(self, one: FakeStep) -> float:
        return self.tokens / one.seconds / self.world

    def changed(self, change: Callable[[FakeStep], FakeStep]) -> FakeRun:
        """Return the run with every step changed."""
        return replace(self, starts=tuple(tuple(map(change, start)) for start in self.starts))


def healthy(steps: int = 60, seed: int = 0, seconds: float = 2.0, first: int = 1, noise: float = 0.01) -> FakeRun:
    """Return a healthy run: the first step compiles, the loss falls, step times vary by a per cent."""
    rng = random.Random(seed)
    rows = []
    for step in range(first, first + steps):
        usual = seconds * (1 + noise * rng.uniform(-1, 1))
        rows.append(
            FakeStep(
                step=step,
                seconds=8 * seconds if step == first else usual,
                loss=2.5 + 8 * math.exp(-step / 25) + 0.02 * rng.gauss(0, 1),
                grad_norm=1 + 0.2 * rng.uniform(-1, 1) + 3 * math.exp(-step / 10),
                lr=3e-4 * min(1.0, step / 10),
                memory_gib=60.0 + (0.0 if step == first else 1.0),
                data_s=0.004 * seconds,
            )
        )
    return FakeRun((tuple(rows),))


# Log formats


def write_own(run: FakeRun) -> str:
    """Write metrics.jsonl of our engine."""
    lines = []
    for start in run.starts:
        lines.append(
            {
                "kind": "header",
                "recipe": "made-up",
                "first_step": start[0].step if start else 1,
                "started": "2026-01-01T00:00:00+00:00",
                "tokens_per_step": run.tokens,
                "flops_per_token": 5e10,
                "world": run.world,
                "peak_flops": 989e12,
                "mfu_convention": "ours",
                "steps": run.total,
                "gpus": f"{run.world}x{run.gpu}",
                **({"settings": run.settings} if run.settings else {}),
            }
        )
        waited = 0.0
        for one in start:
            rest = one.seconds - one.data_s
            parts = {"data": one.data_s, "forward_backward": 0.9 * rest, "optimizer": 0.08 * rest, "other": 0.02 * rest}
            if one.collectives_s is not None:
                parts["collectives"] = one.collectives_s
            lines.append(
                {
                    "kind": "step",
                    "step": one.step,
                    "loss": one.loss if math.isfinite(one.loss) else None,
                    "lr": one.lr,
                    "grad_norm": one.grad_norm if math.isfinite(one.grad_norm) else None,
                    "tokens": run.tokens,
                    "step_s": one.seconds,
                    "tokens_per_s_per_gpu": run.tokens_per_s(one),
                    "tflops_per_gpu": run.tokens_per_s(one) * 5e10 / 1e12,
                    "mfu": run.tokens_per_s(one) * 5e10 / 989e12,
                    "parts_s": parts,
                    "memory_gib": {"peak": one.memory_gib, "reserved": one.memory_gib},
                    "skipped": bool(one.bad),
                    "extra": {"save_blocked_s": waited} if waited else {},
                }
            )
            waited = one.saved_s
            if one.validation is not None:
                done = {"step": one.step, "loss": one.validation, "perplexity": math.exp(one.validation), "tokens": 9}
                lines.append({"kind": "validation", **done, "samples": 3, "seconds": 0.2, "best": False})
    text = "\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
    return "\n".join([text, *run.final_lines]) + "\n"


def write_printed(run: FakeRun) -> str:
    """Write the lines that our engine prints."""
    lines = []
    for start in run.starts:
        for one in start:
            data = round(100 * one.data_s / one.seconds)
            lines.append(
                f"step {one.step}/{run.total}  loss {one.loss:.4f}{' (skipped)' * one.bad}  lr {one.lr:.2e}  "
                f"grad norm {one.grad_norm:.3g}  tokens/s/GPU {run.tokens_per_s(one):,.0f}  MFU 40.0%  "
                f"step time {one.seconds:.4g} s (estimate 2)  memory {one.memory_gib:.3g} GiB (estimate 61)  "
                f"parts data {data}% · fwd+bwd {92 - data}% · optimizer 8% · other 0%  ends 2026-01-01 00:00 (in 3 min)"
            )
            if one.validation is not None:
                done = (
                    f"loss {one.validation:.4f}  perplexity {math.exp(one.validation):.4g}  over 9 tokens of 3 samples"
                )
                lines.append(f"validation  step {one.step}/{run.total}  {done} in 0.2 s  (best so far)")
    return "\n".join([*lines, *run.final_lines]) + "\n"


def write_megatron(run: FakeRun) -> str:
    """Write a log of Megatron-LM with timers."""
    arguments = {"world_size": run.world, "seq_length": run.seq_length, "global_batch_size": run.samples}
    lines = ["------------------------ arguments ------------------------"]
    lines += [f"  {name} {'.' * (47 - len(name))} {value}" for name, value in arguments.items()]
    for start in run.starts:
        lines.append("[before the start of training step] datetime: 2026-01-01 00:00:00 ")
        for one in start:
            rest = one.seconds - one.data_s
            lines.append(
                f" [2026-01-01 00:00:{one.step % 60:02d}] iteration {one.step:8d}/{run.total:8d} | consumed samples: "
                f"{one.step * run.samples:12d} | elapsed time per iteration (ms): {1e3 * one.seconds:.1f} | "
                f"throughput per GPU (TFLOP/s/GPU): {800 / one.seconds:.1f} | learning rate: {one.lr:.6E} | "
                f"global batch size: {run.samples:5d} | lm loss: {one.loss:.6E} | loss scale: {one.loss_scale:.1f} | "
                f"grad norm: {one.grad_norm:.3f} | number of skipped iterations: {one.skipped:3d} | "
                f"number of nan iterations: {one.bad:3d} |"
            )
            lines.append(
                f"[Rank 0] (after {one.step} iterations) memory (GB) | mem-allocated-gigabytes: 40.1 | "
                f"mem-max-allocated-gigabytes: {one.memory_gib * 1.073741824:.3f} | mem-alloc-retires: {run.retries}"
            )
            lines.append("(min, max) time across ranks (ms):")
            times = {
                "forward-backward": (0.9 * rest + one.data_s, 0.9 * rest + one.data_s),  # has the batch generator
                "forward-compute": (0.3 * rest, 0.3 * rest * one.ranks_apart),
                "batch-generator": (one.data_s, one.data_s),
                "optimizer": (0.08 * rest, 0.08 * rest),
            }
            if one.collectives_s is not None:
                times["all-grads-sync"] = (one.collectives_s, one.collectives_s)
            for name, (low, high) in times.items():
                lines.append(f"    {(name + ' ').ljust(48, '.')}: ({1e3 * low:.2f}, {1e3 * high:.2f})")
            if one.saved_s:
                lines.append(f"  successfully saved checkpoint from iteration {one.step:7d} to here")
                lines.append("(min, max) time across ranks (ms):")
                name = "save-checkpoint ".ljust(48, ".")
                lines.append(f"    {name}: ({1e3 * one.saved_s:.2f}, {1e3 * one.saved_s:.2f})")
            if one.validation is not None:
                done = f"lm loss value: {one.validation:.6E} | lm loss PPL: {math.exp(one.validation):.6E} | "
                lines += ["-" * 100, f" validation loss at iteration {one.step} | {done}", "-" * 100]
    return "\n".join([*lines, *run.final_lines]) + "\n"


def write_torchtitan(run: FakeRun) -> str:
    """Write a log of torchtitan with colors."""
    begin = "[rank0]:[titan] 2026-01-01 00:00:00,000 - root - INFO - "
    lines = [
        f"{begin}Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard={run.world}, cp=1, tp=1, ep=1",
        f"{begin}CUDA capacity: NVIDIA {run.gpu} with 79.10GiB memory",
        f"{begin}Trainer is initialized with local batch size 8, global batch size {run.samples}, gradient "
        f"accumulation steps 1, sequence length {run.seq_length}, total steps {run.total} (warmup 20)",
    ]
    for start in run.starts:
        lines.append(f"{begin}Training starts at step {start[0].step}")
        waited = 0.0
        for step in start:
            one, waited = replace(step, seconds=step.seconds + waited), step.saved_s  # step times include the wait
            share = 100 * one.memory_gib / 79.1
            lines.append(
                f"{begin}\x1b[31mstep: {one.step:2}  \x1b[32mloss: {one.loss:8.5f}  \x1b[38;5;208mgrad_norm: "
                f"{one.grad_norm:7.4f}  \x1b[33mmemory: {one.memory_gib:5.2f}GiB({share:.2f}%)  \x1b[34mtps: "
                f"{round(run.tokens_per_s(one)):,}  \x1b[36mtflops: {800 / one.seconds:,.2f}  \x1b[35mmfu: "
                f"{80 / one.seconds:.2f}%  lr: {one.lr:.3e}  "
                f"data_loading(%): {100 * one.data_s / one.seconds:.2f}\x1b[39m"
            )
            if one.saved_s:
                message = "Finished saving the checkpoint (or staging if async is enabled)in"
                lines.append(f"{begin}{message} {one.saved_s:.2f} seconds.")
            if one.validation is not None:
                done = (
                    f"\x1b[32mloss: {one.validation:7.4f}  \x1b[36mmemory: 60.00GiB(75.85%)  \x1b[34mtps: 9,000\x1b[39m"
                )
                lines.append(f"{begin}\x1b[33mvalidate step: {one.step:2}  {done}")
        if run.retries:
            lines.append(f"{begin}{run.retries} CUDA memory allocation retries.")
    return "\n".join([*lines, *run.final_lines]) + "\n"


def write_automodel(run: FakeRun) -> str:
    """Write a log of NeMo AutoModel."""
    lines = [f"2026-01-01 00:00:00 | INFO | nemo_automodel.recipes | World size: {run.world}"]
    for start in run.starts:
        for one in start:
            tps = run.tokens_per_s(one)
            lines.append(
                f"2026-01-01 00:00:00 | INFO | root | step {one.step} | epoch 0 | loss {one.loss:.4f} | grad_norm "
                f"{one.grad_norm:.4f} | lr {one.lr:.2e} | mem {one.memory_gib:.2f} GiB | tps {tps * run.world:.2f}"
                f"({tps:.2f}/gpu) | num_label_tokens {run.tokens}"
            )
            if one.validation is not None:
                done = f"epoch 0 | loss {one.validation:.4f} | lr {one.lr:.2e} | num_label_tokens 4096"
                lines.append(f'2026-01-01 00:00:00 | INFO | root | [val] name "default" | step {one.step} | {done}')
    return "\n".join([*lines, *run.final_lines]) + "\n"


def write_automodel_json(run: FakeRun) -> str:
    """Write training.jsonl of NeMo AutoModel, in which Python writes NaN."""
    lines = []
    for start in run.starts:
        for one in start:
            tps = run.tokens_per_s(one)
            lines.append(
                json.dumps(
                    {
                        "step": one.step,
                        "epoch": 0,
                        "timestamp": "2026-01-01T00:00:00",
                        "loss": one.loss,
                        "grad_norm": one.grad_norm,
                        "lr": one.lr,
                        "mem": one.memory_gib,
                        "tps": tps * run.world,
                        "tps_per_gpu": tps,
                        "num_tokens_per_step": run.tokens,
                        "num_label_tokens": run.tokens,
                    }
                )
            )
    return "\n".join([*lines, *run.final_lines]) + "\n"


def write_kempnerforge(run: FakeRun) -> str:
    """Write a log of KempnerForge."""
    begin = "[rank 0] INFO    "
    lines = [
        f"{begin} Training config: JobConfig(model=ModelConfig(dim=4096, max_seq_len=8192), train=TrainConfig("
        f"batch_size=8, seq_len={run.seq_length}, max_steps={run.total}))",
        f"{begin} DeviceMesh: dims=['dp_shard'], sizes=[{run.world}], world_size={run.world}",
        f"{begin} Detected GPU: NVIDIA {run.gpu} 80GB HBM3 → 989.0 bf16 TFLOPS",
    ]
    for start in run.starts:
        lines.append(
            f"{begin} Starting training: step={start[0].step - 1}, max_steps={run.total}, batch_size=8, grad_accum="
            f"{run.samples // 8 // run.world}, world_size={run.world}"
        )
        for one in start:
            if not math.isfinite(one.loss):
                lines.append(
                    f"[rank 0] WARNING  NaN/Inf loss at step {one.step - 1} (consecutive=1, total=1, last_good_loss="
                    f"2.5000 at step {one.step - 2}) — skipping optimizer step"
                )
                continue
            lines.append(
                f"{begin} [step {one.step}] loss={one.loss:.4f} | lr={one.lr:.2e} | grad_norm={one.grad_norm:.3f} | "
                f"tok/s={run.tokens_per_s(one) * run.world:,.0f} | mfu=40.0% | mem={one.memory_gib:.1f}/79GB | "
                f"step_time={one.seconds:.2f}s"
            )
            if one.validation is not None:
                done = f"eval/loss={one.validation:.4f} | eval/perplexity={math.exp(one.validation):.4f}"
                lines.append(f"{begin} [step {one.step}] {done}")
    return "\n".join([*lines, *run.final_lines]) + "\n"


LOG_WRITERS: dict[str, Callable[[FakeRun], str]] = {
    "own": write_own,
    "printed": write_printed,
    "megatron": write_megatron,
    "torchtitan": write_torchtitan,
    "automodel": write_automodel,
    "automodel_json": write_automodel_json,
    "kempnerforge": write_kempnerforge,
}
FORMAT = {
    "own": "meshwright",
    "printed": "meshwright",
    "megatron": "megatron",
    "torchtitan": "torchtitan",
    "automodel": "automodel",
    "automodel_json": "automodel",
    "kempnerforge": "kempnerforge",
}
ENGINE = {**FORMAT, "megatron": "megatron"}


def case(
    recipe: str = "llama3_8b_pretrain_config", gpus: str = "8xH100", engine: str = "meshwright", *changes: str
) -> Case:
    """Return a case to compare a fake run with."""
    from meshwright.recipes import overrides

    made = overrides.apply(with_engine_strategy(index.load(recipe), engine), ["layout.dp_shard=-1", *changes])
    return case_of(made, model_of(made), clusters.cluster(gpus), engine)


def at_estimated_speed(made: Case, steps: int = 60, seed: int = 0, slower: float = 1.0) -> FakeRun:
    """Return a healthy run of a case at its estimated speed, or slower by a factor."""
    estimate = costs.estimate(made)
    run = healthy(steps, seed, float(estimate.step_s) * slower)
    peak = float(estimate.memory.total) - float(estimate.memory.overhead)
    named = replace(run, seq_length=int(made.seq_length), samples=int(made.global_batch_size), world=int(made.world))
    return named.changed(lambda one: replace(one, memory_gib=peak, data_s=0.004 * one.seconds))
