"""The processes and machines of Accelerate, compared with the GPUs of the job or those that the user gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.frameworks.accelerate.parse_settings import GPU_TYPES
from meshwright.frameworks.accelerate.rules.common import has_command_line, int_value, type_of
from meshwright.frameworks.deepspeed.rules.batch import fits_ranks, sizes_for
from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.types import as_int


class Sizes(NamedTuple):
    """Nodes and GPUs that a training has."""

    nodes: int
    each: int  # GPUs of a node
    where: str = ""  # of the job; empty if the user gives them

    @property
    def world(self) -> int:
        return self.nodes * self.each


def _sizes(ctx: RuleContext, processes: int) -> Sizes | None:
    """Return the GPUs that the user gives, or those of the job if the former are as many as the processes."""
    on, job = ctx.cluster, ctx.parsed.job_gpus
    if on is not None and (on.world != processes or job.count is None):
        return Sizes(on.nodes, on.gpus_per_node)
    if job.nodes is None or job.gpus_per_node is None or job.source is None:
        return None
    return Sizes(job.nodes, job.gpus_per_node, f"--nodes={job.nodes} (line {job.source.line})")


def _known(ctx: RuleContext) -> tuple[int, Sizes] | None:
    """Return the processes of a training on GPUs, and the GPUs that it has."""
    processes = int_value(ctx, "num_processes")
    if not processes or processes < 1 or type_of(ctx) not in GPU_TYPES[1:]:
        return None
    have = _sizes(ctx, processes)
    return None if have is None else (processes, have)


def process_problems(ctx: RuleContext) -> Iterator[Problem]:
    """Yield more processes than GPUs, or fewer: an error where the batch of DeepSpeed does not fit them."""
    known = _known(ctx)
    if known is None or known[0] == known[1].world:
        return
    processes, have = known
    world, inner = have.world, ctx.parsed.referenced
    where = f" of a job with {have.where}" if have.where else ""
    fits = inner is None or fits_ranks(ctx.recipe, inner, processes)
    text, is_error = f"num_processes={processes} exceeds the {world} GPUs{where}", True
    if processes < world:
        text = f"num_processes={processes} leaves {world - processes} of {world} GPUs{where} idle"
        is_error = not fits
    text += _of_batch(ctx, processes, world)
    fix = [ctx.written("num_processes", world)]
    if processes < world and inner is not None and fits and not fits_ranks(ctx.recipe, inner, world):
        fix = []  # together with other batch sizes, which are in another file
    machines = _machines(ctx)
    if fix and not have.where and machines is not None and machines * have.each < world:
        fix.append(ctx.written("num_machines", have.nodes))
    yield Problem(text, tuple(fix), "num_processes", "error" if is_error else "warning")


def _of_batch(ctx: RuleContext, processes: int, world: int) -> str:
    """Return the end of a message: for which of the two numbers the batch of DeepSpeed is, or what the other needs."""
    inner = ctx.parsed.referenced
    batch = None if inner is None else inner.settings.get("train_batch_size")
    if inner is None or batch is None:
        return ""
    now, then = (fits_ranks(ctx.recipe, inner, count) for count in (processes, world))
    if then and not now:
        return f": train_batch_size={batch.value} is that of {world} ranks"
    if now and not then:
        changed = sizes_for(ctx.recipe, inner, world)
        return f"; {ctx.written('num_processes', world)} needs {changed} in {batch.file} too"
    return ""


def _machines(ctx: RuleContext) -> int | None:
    """Return the machines of a file, one by default; None if they are known only at run time."""
    setting = ctx.parsed.settings.get("num_machines")
    return 1 if setting is None else None if setting.unresolved else as_int(setting, 7)


def machine_problems(ctx: RuleContext) -> Iterator[Problem]:
    """Yield another number of machines than the job has nodes, or than the GPUs are spread over."""
    known, machines = _known(ctx), _machines(ctx)
    if known is None or machines is None:
        return
    processes, have = known
    fix = (ctx.written("num_machines", have.nodes),)
    key = "num_machines" if ctx.is_set("num_machines") else "num_processes"
    if have.where and machines != have.nodes:
        waits = "it waits for machines that never join" if machines > have.nodes else "the others do not join"
        yield Problem(f"num_machines={machines}, but the job has {have.where}: {waits}", fix, key)
    elif not have.where and machines < have.nodes and have.world > machines * have.each and processes >= have.world:
        text = f"num_processes={processes} with num_machines={machines} starts {processes // machines} processes "
        text += f"on each, but a node of {ctx.cluster} has {have.each} GPUs"
        yield Problem(text, fix, key, "error" if has_command_line(ctx) else "warning")
