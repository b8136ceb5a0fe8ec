"""How the framework that ran records a profiler trace of a few steps."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.clusters import AMD_ARCHS
from meshwright.doctor import remedies
from meshwright.doctor.finding import Remedy
from meshwright.doctor.run_stats import RunStats
from meshwright.doctor.their_keys import framework_of, settings_there

PROFILE = "train.profile=true"
WHY = "a trace of a few steps shows the slow kernels"
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "megatron-lm": (
        *("--profile", "--use-pytorch-profiler", "--profile-step-start 10", "--profile-step-end 12"),
        "--tensorboard-dir traces",  # the trace is written next to it
    ),
    "megatron-bridge": (
        *("profiling.use_pytorch_profiler=true", "profiling.profile_ranks=[0]"),
        *("profiling.profile_step_start=10", "profiling.profile_step_end=12"),
    ),
    "deepspeed": ('"flops_profiler": {"enabled": true, "profile_step": 10}',),
    "axolotl": ("profiler_steps: 5", "profiler_steps_start: 10"),
}
"""Frameworks and front ends whose trace needs more than the key of train.profile -> the settings."""
NSYS = "nsys profile --trace=cuda,nvtx --delay=120 --duration=30 --output=trace COMMAND"
"""For programs without a profiler of their own; COMMAND is what starts the training on one node."""


def profiler_trace(stats: RunStats) -> Remedy:
    """Return how to record a trace: a setting of the framework, or a command around it if it has none."""
    run = stats.run
    if run.kind == "meshwright":
        return Remedy(try_=(PROFILE,), what="layout", why=WHY)
    there = SETTINGS.get(run.header.front_end) or SETTINGS.get(framework_of(run) or "", ())
    there = there or (() if run.kind == "transformers" else settings_there(run, stats.case, (PROFILE,)))
    if there:
        return Remedy(try_=(PROFILE,), what="layout", why=WHY, there=there)
    if stats.case is not None and stats.case.cluster.gpu.arch in AMD_ARCHS:
        return remedies.advice("rocprofv3 --sys-trace --output-format pftrace -- COMMAND", why=WHY)
    return remedies.advice(NSYS, why=f"{WHY}, from the second minute on; COMMAND starts the training on one node")
