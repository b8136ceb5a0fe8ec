"""Writes fake runs as the current versions of the frameworks print them, and where each line was read.

`SOURCES` names repository, commit and line of the code behind every format: only what it prints is used here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import NamedTuple

from tests.doctor.fake_runs import LOG_WRITERS, FakeRun, FakeStep

START = datetime(2026, 3, 4, 5, 6, 7)


class Source(NamedTuple):
    """Where a log format was read."""

    repo: str
    commit: str
    place: str
    what: str


TITAN = ("pytorch/torchtitan", "b5bcd76c66d0acb1a08b176d9639425bc55e0b2a")
MEGATRON = ("NVIDIA/Megatron-LM", "d98e8a64ddf34856e74b24714e3bedb2f5a39553")
BRIDGE = ("NVIDIA-NeMo/Megatron-Bridge", "067f987df03b8355b03192d88d70f1709fedf51a")
AUTOMODEL = ("NVIDIA-NeMo/Automodel", "36044ad3d139363fb6c73c24af2e7c6b65ec52f6")
NEMO = ("NVIDIA-NeMo/NeMo", "8cfedd7203462cb251a914e700e5605444277561")
TRAINER = ("huggingface/transformers", "d56c55bf564ddb176759eb6ec199442682564916")
AXOLOTL = ("axolotl-ai-cloud/axolotl", "067b021c8b87a9e5e380b9173c704cf7340e30f5")
FACTORY = ("hiyouga/LLaMA-Factory", "ff6d4d12eeb035d6ce06805a5733dd7b29f2ac30")
SWIFT = ("modelscope/ms-swift", "3602360a562313afbf2ef6065fdf61f271a2c5b9")
DEEPSPEED = ("microsoft/DeepSpeed", "38327e07f6cd39b63418f60cedd1651b0be3e7c3")
FORGE = ("KempnerInstitute/KempnerForge", "5666d0d161539998210f99f16f986b1ab76cbffe")
TORCH = ("pytorch/pytorch", "cf30153c4c131c8164ee7798e5022d810682e2cb")

SOURCES = (
    Source(*TITAN, "torchtitan/components/metrics.py:527", "step line, colors; MFU N/A in fp8"),
    Source(*TITAN, "torchtitan/components/metrics.py:570", "validation line"),
    Source(*TITAN, "torchtitan/trainer.py:388", "model line"),
    Source(*TITAN, "torchtitan/trainer.py:621", "batch line: tokens per DP rank, tokens per train step"),
    Source(*TITAN, "torchtitan/distributed/parallel_dims.py:274", "device mesh line"),
    Source(*TITAN, "torchtitan/components/checkpointer/dcp.py:490", "checkpoint line"),
    Source(*TITAN, "torchtitan/tools/utils.py:136", "garbage collection line"),
    Source(*MEGATRON, "megatron/training/training.py:3567", "iteration line, MoE losses, --log-throughput"),
    Source(*MEGATRON, "megatron/core/timers.py:346", "--timing-log-option minmax"),
    Source(*MEGATRON, "megatron/core/timers.py:344", "--timing-log-option max"),
    Source(*MEGATRON, "megatron/core/timers.py:361", "--timing-log-option all"),
    Source(*MEGATRON, "megatron/core/utils.py:1820", "--log-straggler"),
    Source(*MEGATRON, "megatron/training/utils/common_utils.py:321", "memory line"),
    Source(*MEGATRON, "megatron/training/checkpointing.py:1086", "checkpoint line"),
    Source(*MEGATRON, "megatron/training/training.py:4069", "end after SIGTERM"),
    Source(*BRIDGE, "src/megatron/bridge/training/utils/train_utils.py:1050", "step time line"),
    Source(*BRIDGE, "src/megatron/bridge/training/utils/train_utils.py:1088", "iteration line"),
    Source(*AUTOMODEL, "nemo_automodel/recipes/llm/train_ft.py:1567", "step line"),
    Source(*AUTOMODEL, "nemo_automodel/recipes/llm/train_ft.py:1331", "tokens/s/GPU: divided by dp × cp"),
    Source(*AUTOMODEL, "nemo_automodel/recipes/llm/train_ft.py:1512", "validation line"),
    Source(*AUTOMODEL, "nemo_automodel/components/loggers/log_utils.py:72", "prefix with time and level"),
    Source(*NEMO, "nemo/lightning/pytorch/callbacks/progress_printer.py:140", "iteration line"),
    Source(*NEMO, "nemo/lightning/pytorch/callbacks/progress_bar.py:43", "progress bar"),
    Source(*TRAINER, "src/transformers/trainer.py:1494", "lines before training"),
    Source(*TRAINER, "src/transformers/trainer.py:2095", "figures of a record; NaN is logged as 0"),
    Source(*TRAINER, "src/transformers/trainer_callback.py:624", "record and progress bar"),
    Source(*AXOLOTL, "src/axolotl/core/trainers/base.py:742", "memory of a record"),
    Source(*AXOLOTL, "src/axolotl/core/trainers/base.py:768", "trainable tokens/s/GPU of a record"),
    Source(*AXOLOTL, "src/axolotl/logging_config.py:108", "prefix of its messages"),
    Source(*FACTORY, "src/llamafactory/train/callbacks.py:277", "trainer_log.jsonl"),
    Source(*FACTORY, "src/llamafactory/extras/logging.py:109", "prefix of its messages"),
    Source(*SWIFT, "swift/trainers/patcher.py:18", "step, time and memory of a record; logging.jsonl"),
    Source(*SWIFT, "swift/megatron/callbacks/print.py:58", "record of megatron-swift"),
    Source(*DEEPSPEED, "deepspeed/runtime/fp16/loss_scaler.py:176", "loss scale at its minimum"),
    Source(*DEEPSPEED, "deepspeed/runtime/fp16/loss_scaler.py:180", "skipped step and loss scale"),
    Source(*DEEPSPEED, "deepspeed/runtime/engine.py:2489", "step line with skipped steps and learning rate"),
    Source(*DEEPSPEED, "deepspeed/utils/timer.py:265", "samples per second and memory of a step"),
    Source(*DEEPSPEED, "deepspeed/utils/timer.py:145", "times of the breakdown"),
    Source(*DEEPSPEED, "deepspeed/runtime/config.py:1004", "printed config"),
    Source(*FORGE, "kempnerforge/metrics/logger.py:141", "step line"),
    Source(*FORGE, "kempnerforge/resilience/signal_handler.py:106", "end after SIGTERM"),
    Source(*TORCH, "torch/_dynamo/convert_frame.py:1995", "recompile limit"),
    Source(*TORCH, "torch/_dynamo/guards.py:5389", "TORCH_LOGS=recompiles"),
    Source(*TORCH, "torch/distributed/elastic/agent/server/api.py:753", "launcher after SIGTERM"),
    Source(*TORCH, "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp", "watchdog lines (629 and 2168 in 2.6)"),
    Source(*TORCH, "torch/distributed/flight_recorder/components/types.py:286", "flight recorder's analysis"),
    Source(*TORCH, "c10/cuda/CUDACachingAllocator.cpp", "out-of-memory message (malloc)"),
)


def _timed(run: FakeRun, first: int = 0) -> Iterator[tuple[FakeStep, datetime]]:
    """Yield the steps of a start with the time of their line; checkpoints and pauses take time too."""
    now = START + timedelta(days=first)
    for one in run.starts[first]:
        now += timedelta(seconds=one.seconds * run.log_every + one.pause_s)
        yield one, now
        now += timedelta(seconds=one.saved_s)


def write_torchtitan_now(run: FakeRun) -> str:
    """Write a log of torchtitan as of 2026: no data-loading time, another batch line."""
    lines: list[str] = []
    ranks = run.world // (run.tp * run.pp * run.cp)
    quick = max(run.data_ranks, 1)
    for first, start in enumerate(run.starts):
        now = START + timedelta(days=first)
        begin = f"[rank0]:[titan] {now:%Y-%m-%d %H:%M:%S},123 - root - INFO - "
        lines += [
            f"{begin}Building device mesh with parallelism: pp={run.pp}, dp_replicate=1, dp_shard={ranks}, "
            f"cp={run.cp}, "
            f"tp={run.tp}, ep=1",
            f"{begin}[GC] Initial GC collection took 0.00 seconds",
            f"{begin}CUDA capacity: NVIDIA {run.gpu} 80GB HBM3 with 79.10GiB memory",
            *(
                [f"{begin}\x1b[34mModel {run.model} \x1b[31msize: 8,030,261,248 total parameters\x1b[39m"]
                * bool(run.model)
            ),
            f"{begin}Peak FLOPS used for computing MFU: 9.890e+14",
            f"{begin}Trainer is initialized with {run.tokens // quick} tokens per DP rank, {run.tokens} tokens per "
            f"train "
            f"step, gradient accumulation steps 1, maximum context length {run.seq_length}, total steps {run.total} "
            f"(warmup {run.warmup})",
            f"{begin}Training starts at step {max(1, start[0].step - run.log_every + 1)}",
        ]
        for one, now in _timed(run, first):
            begin = f"[rank0]:[titan] {now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d} - root - INFO - "
            paused = replace(one, seconds=one.seconds + (one.pause_s + one.waited_s) / run.log_every)
            mfu = "N/A" if run.fp8 else f"{45 * run.base_s / paused.seconds:.2f}%"
            lines.append(
                f"{begin}\x1b[31mstep: {one.step:2}  \x1b[32mloss: {one.loss:8.5f}  \x1b[38;5;208mgrad_norm: "
                f"{one.grad_norm:7.4f}  \x1b[36mmemory: {one.memory_gib:5.2f}GiB({100 * one.memory_gib / 79.1:.2f}%)  "
                f"\x1b[34mtps: {round(run.tokens_per_s(paused)):,}  \x1b[36mtflops: "
                f"{440 * run.base_s / paused.seconds:,.2f}  \x1b[35mmfu: {mfu}\x1b[39m"
            )
            lines += [line.replace("{begin}", begin) for line in one.lines]
            if one.saved_s:
                lines.append(f"{begin}Saving the checkpoint.")
                lines.append(f"{begin}Finished saving the checkpoint in {one.saved_s:.2f} seconds.")
            if one.validation is not None:
                lines.append(
                    f"{begin}\x1b[33mvalidate step: {one.step:2}  \x1b[32mloss: {one.validation:7.4f}  \x1b[36mmemory: "
                    f"{one.memory_gib:5.2f}GiB(75.85%)  \x1b[34mtps: 9,000\x1b[39m"
                )
    return _ended(run, lines, f"[rank0]:[titan] {now:%Y-%m-%d %H:%M:%S},999 - root - INFO - Training completed")


def _ended(run: FakeRun, lines: list[str], done: str) -> str:
    complete = bool(run.starts[-1]) and run.starts[-1][-1].step >= run.total
    return "\n".join([*lines, *([done] if complete and not run.final_lines else ()), *run.final_lines]) + "\n"


def _megatron_timers(run: FakeRun, one: FakeStep) -> dict[str, list[float]]:
    """Return the seconds of every rank by timer; a slow rank is late in the collectives, where the others wait."""
    each = [one.seconds * factor for factor in _ranks(run, one)]
    slowest, collectives = max(each), one.collectives_s if one.collectives_s is not None else 0.04 * one.seconds
    waits = [slowest - mine for mine in each]
    return {
        "forward-backward": [0.9 * one.seconds + one.data_s] * run.world,
        "forward-compute": [0.3 * mine for mine in each],
        "backward-compute": [0.55 * mine for mine in each],
        "batch-generator": [one.data_s or 1e-4] * run.world,
        "all-grads-sync": [collectives + 0.85 * wait for wait in waits],
        "optimizer": [0.03 * one.seconds] * run.world,
    }


def _ranks(run: FakeRun, one: FakeStep) -> list[float]:
    factors = [1.0 + 0.005 * ((7 * rank) % 5) for rank in range(run.world)]
    if run.slow_rank is not None:
        factors[run.slow_rank] = one.ranks_apart
    return [factor / max(factors) for factor in factors]


def _timer_lines(run: FakeRun, timers: dict[str, list[float]], option: str) -> Iterator[str]:
    if option == "all":
        yield "times across ranks (ms):"
        for name, times in timers.items():
            yield f"  {name}:"
            yield from (f"     rank {rank:2d}: {1e3 * seconds:.2f}" for rank, seconds in enumerate(times))
    elif option == "max":
        yield "max time across ranks (ms):"
        yield from (f"    {(name + ' ').ljust(48, '.')}: {1e3 * max(times):.2f}" for name, times in timers.items())
    elif option == "minmax":
        yield "(min, max) time across ranks (ms):"
        for name, times in timers.items():
            yield f"    {(name + ' ').ljust(48, '.')}: ({1e3 * min(times):.2f}, {1e3 * max(times):.2f})"


def write_megatron_now(run: FakeRun, option: str = "", bridge: bool = False, straggler: bool = False) -> str:
    """Write a log of Megatron-LM or Megatron-Bridge, with timers if their option is set."""
    values = {"global_batch_size": run.samples, "seq_length": run.seq_length, "world_size": run.world, **run.arguments}
    lines = [
        f"using world size: {run.world}, data-parallel size: {run.data_ranks}, context-parallel size: {run.cp}, "
        f"hierarchical context-parallel sizes: None, tensor-model-parallel size: {run.tp}, pipeline-model-parallel "
        f"size: "
        f"{run.pp}"
    ]
    if not bridge:
        lines.append("------------------------ arguments ------------------------")
        lines += [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(values.items())]
        lines.append("-------------------- end of arguments ---------------------")
    for first, start in enumerate(run.starts):
        lines.append(f"[before the start of training step] datetime: {START:%Y-%m-%d %H:%M:%S} ")
        for one, now in _timed(run, first):
            if bridge:
                lines.append(
                    f"Step Time : {one.seconds:.2f}s GPU utilization: "
                    f"{440 * run.base_s / one.seconds:.1f}MODEL_TFLOP/s/GPU"
                )
            aux = "" if one.aux_loss is None else f" load_balancing_loss: {one.aux_loss:.6E} |"
            loss = f" lm loss: {one.loss:.6E} |{aux}" if one.loss >= 0 else ""  # NaN is not printed
            stamp = f"{now:%Y-%m-%d %H:%M:%S}" + ("" if bridge else f".{now.microsecond:06d}")
            lines.append(
                f" [{stamp}] iteration {one.step:8d}/{run.total:8d} | consumed samples: {one.step * run.samples:12d} | "
                f"elapsed time per iteration (ms): {1e3 * (one.seconds + one.pause_s / run.log_every):.1f} | "
                + ("" if bridge else f"throughput per GPU (TFLOP/s/GPU): {440 * run.base_s / one.seconds:.1f} | ")
                + f"learning rate: {one.lr:.6E} | global batch size: {one.samples or run.samples:5d} |{loss} "
                f"loss scale: {one.loss_scale:.1f} | grad norm: {one.grad_norm:.3f} | number of skipped iterations: "
                f"{one.skipped:3d} "
                f"| number of nan iterations: {one.bad:3d} |"
            )
            if one is start[0]:
                gib = 1024 * one.memory_gib
                lines.append(
                    f"[Rank 0] (after {one.step} iterations) memory (MB) | allocated: {0.6 * gib:.2f} | max allocated: "
                    f"{gib:.2f} | reserved: {1.05 * gib:.2f} | max reserved: {1.05 * gib:.2f}"
                )
            lines += _timer_lines(run, _megatron_timers(run, one), option)
            lines += [_straggler(run, one, now)] if straggler else []
            lines += one.lines
            if one.saved_s:
                lines.append(
                    f"  [{now:%Y-%m-%d %H:%M:%S}.123456] successfully saved checkpoint from iteration {one.step:7d} to "
                    f"/checkpoints [ t 1/{run.tp}, p 1/{run.pp} ]"
                )
                lines += _timer_lines(run, {"save-checkpoint": [one.saved_s] * run.world}, option or "minmax")
            if one.validation is not None:
                done = f"lm loss value: {one.validation:.6E} | lm loss PPL: {math.exp(one.validation):.6E} | "
                lines += ["-" * 108, f" validation loss at iteration {one.step} | {done}", "-" * 108]
    return _ended(run, lines, f"[after training is done] datetime: {START:%Y-%m-%d %H:%M:%S} ")


def _straggler(run: FakeRun, one: FakeStep, now: datetime) -> str:
    each = [1e3 * one.seconds * factor for factor in _ranks(run, one)]
    slow, fast = max(range(run.world), key=lambda rank: each[rank]), min(range(run.world), key=lambda rank: each[rank])
    speed = [440 * min(each) / mine for mine in each]
    return (
        f"INFO:megatron.core.utils:[{now:%Y-%m-%d %H:%M:%S}] | MnRtt/Rnk: {each[fast]:.2f}ms/{fast} | MxRtt/Rnk: "
        f"{each[slow]:.2f}ms/{slow} | MnPwr/Rnk: 612.10W/3 | MxPwr/Rnk: 690.20W/1 | MnTmp/Rnk: 51.00C/2 | MxTmp/Rnk: "
        f"66.00C/5 | MnUtl/Rnk: 99.00%/0 | MxUtl/Rnk: 100.00%/1 | MnClk/Rnk: 1410.00MHz/2 | MxClk/Rnk: 1980.00MHz/1 | "
        f"MnDRtt/Rnk: 0.31ms/0 | MxDRtt/Rnk: 0.82ms/4 | MnEtpt/Rnk: {speed[slow]:.2f}TF/{slow} | MxEtpt/Rnk: "
        f"{speed[fast]:.2f}TF/{fast}"
    )


def write_nemo(run: FakeRun) -> str:
    """Write a log of NeMo 2 (ProgressPrinter), which counts iterations from 0."""
    lines = []
    for first in range(len(run.starts)):
        for one, _ in _timed(run, first):
            figures = {
                "lr": one.lr,
                "global_batch_size": run.samples,
                "global_step": one.step - 1,
                "reduced_train_loss": one.loss,
                "train_step_timing in s": one.seconds + one.pause_s / run.log_every,
                "consumed_samples": one.step * run.samples,
                **({} if one.validation is None else {"val_loss": one.validation}),
            }
            text = " | ".join(
                f"{name}: {value:.4}" if isinstance(value, float) else f"{name}: {value}"
                for name, value in figures.items()
            )
            lines.append(f"Training epoch {int(one.epoch)}, iteration {one.step - 1}/{run.total - 1} | {text}")
            lines += one.lines
    return _ended(run, lines, "`Trainer.fit` stopped: `max_steps` reached.")


def write_nemo_bar(run: FakeRun) -> str:
    """Write a log of NeMo with a progress bar."""
    lines = []
    for first in range(len(run.starts)):
        for one, now in _timed(run, first):
            passed = _clock((now - START - timedelta(days=first)).total_seconds())
            text = (
                f"reduced_train_loss={one.loss:.4g}, global_step={one.step - 1:.3f}, consumed_samples="
                f"{one.step * run.samples:.1f}, train_step_timing in s={one.seconds + one.pause_s / run.log_every:.4g}"
            )
            lines.append(
                f"Epoch {int(one.epoch)}:  {100 * one.step // run.total}%|█         | {one.step}/{run.total} "
                f"[{passed}<1:02:03, v_num=0, {text}]"
            )
            lines += one.lines
    return _ended(run, lines, "`Trainer.fit` stopped: `max_steps` reached.")


def write_automodel_now(run: FakeRun) -> str:
    """Write a log of AutoModel, whose figures per GPU are divided by dp × cp only."""
    lines = [
        f"{START:%Y-%m-%d %H:%M:%S} | \x1b[32mINFO\x1b[0m | nemo_automodel.recipes.llm.train_ft | Experiment_details:"
    ]
    if run.states_world:
        lines.append(f"> initializing torch distributed with {run.world} workers.")
    for first in range(len(run.starts)):
        for one, now in _timed(run, first):
            paused = replace(one, seconds=one.seconds + one.pause_s + one.waited_s)
            tps = run.tokens_per_s(paused) * run.world
            lines.append(
                f"{now:%Y-%m-%d %H:%M:%S} | \x1b[32mINFO\x1b[0m | root | step {one.step} | epoch {int(one.epoch)} | "
                f"loss "
                f"{one.loss:.4f} | grad_norm {one.grad_norm:.4f} | lr {one.lr:.2e} | mem {one.memory_gib:.2f} GiB | "
                f"tps "
                f"{tps:.2f}({tps / max(run.data_ranks * run.cp, 1):.2f}/gpu) | num_label_tokens "
                f"{run.tokens - 17 * (one.step % 90)}"
            )
            lines += one.lines
            if one.validation is not None:
                done = f"epoch {int(one.epoch)} | loss {one.validation:.4f} | lr {one.lr:.2e} | num_label_tokens 4096"
                lines.append(f'{now:%Y-%m-%d %H:%M:%S} | INFO | root | [val] name "default" | step {one.step} | {done}')
    return _ended(run, lines, "")


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"


def _bar(run: FakeRun, step: int, seconds: float, title: str = "") -> str:
    share = int(100 * step / run.total)
    full = share // 10
    left = _clock(seconds / max(step, 1) * (run.total - step))
    pace = f"{seconds / max(step, 1):5.2f}s/it"
    return f"{title}{share:3d}%|{'█' * full}{' ' * (10 - full)}| {step}/{run.total} [{_clock(seconds)}<{left}, {pace}]"


Extra = Callable[[FakeRun, FakeStep, float], dict[str, object]]


def _records(run: FakeRun, one: FakeStep) -> dict[str, object]:
    """Return a record of the Trainer; a NaN loss is logged as 0."""
    loss = one.loss if math.isfinite(one.loss) else 0.0
    return {"loss": loss, "grad_norm": one.grad_norm, "learning_rate": one.lr, "epoch": one.epoch}


def _shown(record: dict[str, object], strings: bool) -> str:
    if strings:
        return str({name: f"{value:.4g}" if isinstance(value, float) else value for name, value in record.items()})
    return str({name: round(value, 10) if isinstance(value, float) else value for name, value in record.items()})


def write_trainer(
    run: FakeRun,
    strings: bool = True,
    prefix: str = "[INFO|trainer.py:1494] >> ",
    title: str = "",
    extra: Extra | None = None,
) -> str:
    """Write the console output of the Trainer: records between progress bars, whose updates share a line."""
    per_rank = max(1, run.samples // max(run.data_ranks, 1))
    lines = [
        *run.first_lines,
        f"{prefix}***** Running training *****",
        f"{prefix}  Num examples = {run.total * run.samples // 3:,}",
        f"{prefix}  Num Epochs = 3",
        f"{prefix}  Instantaneous batch size per device = {per_rank}",
        f"{prefix}  Total train batch size (w. parallel, distributed & accumulation) = {run.samples:,}",
        f"{prefix}  Gradient Accumulation steps = 1",
        f"{prefix}  Total optimization steps = {run.total:,}",
        f"{prefix}  Number of trainable parameters = 8,030,261,248",
    ]
    for first in range(len(run.starts)):
        bar = ""
        last = max(0, run.starts[first][0].step - run.log_every)
        begun, origin = last, START + timedelta(days=first)
        for one, now in _timed(run, first):
            seconds = (now - origin).total_seconds()
            lines += one.lines
            bar += "".join(
                "\r" + _bar(run, step, seconds * (step - begun) / max(1, one.step - begun), title)
                for step in range(last + 1, one.step + 1)
            )
            last = one.step
            record = {**_records(run, one), **(extra(run, one, seconds) if extra else {})}
            lines += [bar, "\r" + " " * 60 + "\r" + _shown(record, strings)]
            bar = "\r" + _bar(run, one.step, seconds, title)
            if one.validation is not None:
                done = {
                    "eval_loss": one.validation,
                    "eval_runtime": 7.5,
                    "eval_samples_per_second": 33.1,
                    "epoch": one.epoch,
                }
                lines += [bar, _shown(done, strings)]
                bar = ""
        lines.append(bar)
    if not run.final_lines:
        lines.append(_shown({"train_runtime": 123.4, "train_loss": 1.5, "epoch": 3.0}, strings))
    return "\n".join([*lines, *run.final_lines]) + "\n"


def write_trainer_old(run: FakeRun) -> str:
    """Write the console output of transformers 4, whose records have numbers."""
    return write_trainer(run, strings=False)


def write_trainer_state(run: FakeRun) -> str:
    """Write trainer_state.json."""
    history: list[dict[str, object]] = []
    for first in range(len(run.starts)):
        for one, _ in _timed(run, first):
            history.append({**_records(run, one), "step": one.step})
            if one.validation is not None:
                history.append({"epoch": one.epoch, "eval_loss": one.validation, "step": one.step})
    return json.dumps(
        {"epoch": 3.0, "global_step": history[-1]["step"], "log_history": history, "max_steps": run.total}, indent=2
    )


def write_axolotl(run: FakeRun) -> str:
    """Write the console output of axolotl."""

    def extra(run: FakeRun, one: FakeStep, seconds: float) -> dict[str, object]:
        loss = one.loss if math.isfinite(one.loss) else 0.0
        return {
            "ppl": round(math.exp(min(loss, 80)), 5),
            "memory/max_active (GiB)": round(one.memory_gib - 0.5, 2),
            "memory/max_allocated (GiB)": round(one.memory_gib, 2),
            "memory/device_reserved (GiB)": round(one.memory_gib + 3, 2),
            "tokens/train_per_sec_per_gpu": round(0.7 * run.tokens_per_s(one), 2),
            "tokens/total": one.step * run.tokens,
            "tokens/trainable": int(0.7 * one.step * run.tokens),
        }

    first = f"[{START:%Y-%m-%d %H:%M:%S},101] [INFO] [axolotl.train] Starting trainer..."
    return write_trainer(replace(run, first_lines=(first, *run.first_lines)), prefix="", extra=extra)


def write_swift(run: FakeRun) -> str:
    """Write the console output of ms-swift, whose bar has a title."""
    first = "[INFO:swift] swift.__version__: 4.1.0"
    return write_trainer(
        replace(run, first_lines=(first, *run.first_lines)),
        strings=False,
        prefix="[INFO:swift] ",
        title="Train: ",
        extra=_of_swift,
    )


def _of_swift(run: FakeRun, one: FakeStep, seconds: float) -> dict[str, object]:
    return {
        "global_step/max_steps": f"{one.step}/{run.total}",
        "elapsed_time": _words(seconds),
        "remaining_time": _words(seconds / one.step * (run.total - one.step)),
        "memory(GiB)": round(one.memory_gib, 2),
        "train_speed(s/it)": round(seconds / one.step, 6),
    }


def _words(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}h {minute}m {second}s" if hours else f"{minute}m {second}s" if minute else f"{second}s"


def write_swift_json(run: FakeRun) -> str:
    """Write logging.jsonl of ms-swift."""
    lines = []
    for first in range(len(run.starts)):
        for one, now in _timed(run, first):
            seconds = (now - START - timedelta(days=first)).total_seconds()
            lines.append(json.dumps({**_records(run, one), **_of_swift(run, one, seconds)}))
            if one.validation is not None:
                done = {"eval_loss": one.validation, "epoch": one.epoch}
                lines.append(json.dumps({**done, **_of_swift(run, one, seconds)}))
    return "\n".join([*lines, *run.final_lines]) + "\n"


def write_swift_megatron(run: FakeRun) -> str:
    """Write the console output of megatron-swift."""
    lines = ["[INFO:swift] The logging file will be saved in: /output/logging.jsonl"]
    for first in range(len(run.starts)):
        for one, now in _timed(run, first):
            seconds = (now - START - timedelta(days=first)).total_seconds()
            record = {name: value for name, value in _records(run, one).items() if name != "epoch"}
            swift = _of_swift(run, one, seconds)
            swift = {"iteration": swift.pop("global_step/max_steps"), **swift}
            loss = one.loss if math.isfinite(one.loss) else float("nan")
            lines.append(str({**record, "loss": loss, **swift}))
            lines += one.lines
            if one.validation is not None:
                lines.append(str({"eval_loss": one.validation, **swift}))
    return "\n".join([*lines, *run.final_lines]) + "\n"


def write_factory_json(run: FakeRun) -> str:
    """Write trainer_log.jsonl of LLaMA-Factory."""
    lines = []
    for first in range(len(run.starts)):
        for one, now in _timed(run, first):
            seconds = (now - START - timedelta(days=first)).total_seconds()
            loss = one.loss if math.isfinite(one.loss) else 0.0
            record = {
                "current_steps": one.step,
                "total_steps": run.total,
                "loss": loss,
                "lr": one.lr,
                "epoch": one.epoch,
            }
            rest = {
                "percentage": 100 * one.step / run.total,
                "elapsed_time": _clock(seconds),
                "remaining_time": "0:01:02",
            }
            tokens = {"throughput": run.tokens * one.step / seconds, "total_tokens": run.tokens * one.step}
            lines.append(json.dumps({**record, **rest, **tokens}))
            if one.validation is not None:
                record = {"current_steps": one.step, "total_steps": run.total, "eval_loss": one.validation}
                lines.append(json.dumps({**record, "epoch": one.epoch, **rest}))
    return "\n".join([*lines, *run.final_lines]) + "\n"


def write_trainer_deepspeed(run: FakeRun) -> str:
    """Write the Trainer's output with DeepSpeed in fp16, which prints every skipped step."""

    def overflow(one: FakeStep) -> FakeStep:
        if not one.skipped:
            return one
        begin = f"[{START:%Y-%m-%d %H:%M:%S},001] [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0"
        scales = [int(one.loss_scale) << index for index in reversed(range(one.skipped))]
        texts = (f"{begin} Skipping step. Attempted loss scale: {2 * scale}, reducing to {scale}" for scale in scales)
        return replace(one, lines=(*texts, *one.lines))

    return write_trainer(run.changed(overflow))


WRITERS: dict[str, Callable[[FakeRun], str]] = {
    **LOG_WRITERS,
    "torchtitan_now": write_torchtitan_now,
    "megatron_now": write_megatron_now,
    "megatron_minmax": lambda run: write_megatron_now(run, "minmax"),
    "megatron_max": lambda run: write_megatron_now(run, "max"),
    "megatron_all": lambda run: write_megatron_now(run, "all"),
    "megatron_straggler": lambda run: write_megatron_now(run, straggler=True),
    "bridge": lambda run: write_megatron_now(run, bridge=True),
    "nemo": write_nemo,
    "nemo_bar": write_nemo_bar,
    "automodel_now": write_automodel_now,
    "trainer": write_trainer,
    "trainer_old": write_trainer_old,
    "trainer_state": write_trainer_state,
    "trainer_deepspeed": write_trainer_deepspeed,
    "axolotl": write_axolotl,
    "swift": write_swift,
    "swift_json": write_swift_json,
    "swift_megatron": write_swift_megatron,
    "factory_json": write_factory_json,
}
"""Every format of a log, by its name."""
