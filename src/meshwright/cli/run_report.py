"""What runs and measurements of runs print."""

from __future__ import annotations

import shlex
from typing import Any

from meshwright.api.summary import layout_summary
from meshwright.cli.console import console, escape, table
from meshwright.cli.layout import Answer
from meshwright.display import plural


def train(answer: Answer, found: Any) -> None:
    """Print the metrics of a run, next to the estimate if it ran on GPUs."""
    out, losses, memory = console(), answer["losses"], answer["memory_gib"]
    where = f"{plural(answer['steps'], 'step')} on {answer['ranks']} × {escape(answer['device'])}"
    out.print(f"[bold]{escape(answer['recipe'])}[/]  {where}  {layout_summary(answer['layout'])}")
    if answer["resumed_from"]:
        out.print(f"resumed {escape(answer['resumed_from'])}")
    if not losses:
        done = escape(answer["stopped_early"] or "the run was already complete")
        out.print(f"{done}; nothing was trained")
        _print_validation(answer)
        return
    out.print(
        f"loss    {losses[0]:.4f} → {losses[-1]:.4f}"
        + (f"  skipped steps {answer['skipped']}" * bool(answer["skipped"]))
    )
    _print_validation(answer)
    if answer["stopped_early"]:
        out.print(escape(answer["stopped_early"]))
    speed = f"{answer['tokens_per_s_per_gpu']:,.0f} tokens/s/rank, step {answer['step_s']:.3g} s"
    if answer["mfu"] is not None:
        speed += f", {answer['tflops_per_gpu']:.0f} TFLOP/s/GPU, MFU {answer['mfu']:.1%} ({answer['mfu_convention']})"
    out.print(f"speed   {speed}")
    out.print("memory  " + "  ".join(f"{part} {value:.3g}" for part, value in memory.items()) + " GiB")
    if answer["estimate"] is not None:
        out.print(f"against {_against_estimate(answer)}")
    for label, key in (("metrics", "folder"), ("saved", "checkpoint"), ("model", "exported")):
        if answer[key]:
            out.print(f"{label:<7} {escape(answer[key])}{_not_the_best(answer) if key == 'exported' else ''}")


def _not_the_best(answer: Answer) -> str:
    """Return the step of the exported model and how to get a better one, if an earlier validation was better."""
    last, best = answer["first_step"] + answer["steps"] - 1, answer["best_step"]
    if best is None or best >= last:
        return ""
    convert = f"meshwright convert {shlex.quote(answer['folder'])} OUT --checkpoint best"
    kept = escape(convert) if answer["best_checkpoint"] else f"step {best}, not kept (checkpoint.keep_best=false)"
    return f" (step {last}; best: {kept})"


def _print_validation(answer: Answer) -> None:
    """Print the last and the best validation."""
    if not answer["validation"]:
        return
    out, last = console(), answer["validation"][-1]
    out.print(f"val     {_validated(last)} over {last['tokens']:,} tokens of {plural(last['samples'], 'sample')}")
    best = next((one for one in reversed(answer["validation"]) if one["step"] == answer["best_step"]), None)
    if best is not None:
        kept = f", kept in {escape(answer['best_checkpoint'])}" if answer["best_checkpoint"] else ""
        out.print(f"best    {_validated(best)}{kept}")


def _validated(one: Answer) -> str:
    shown = f", perplexity {one['perplexity']:.4g}" if one["perplexity"] is not None else ""
    return f"loss {one['loss']:.4f}{shown} at step {one['step']}"


def _against_estimate(answer: Answer) -> str:
    """Return measured over estimated: above 1 the run was slower, or took more memory."""
    estimate = answer["estimate"]
    total = estimate["memory_gib"]["total"] - estimate["memory_gib"]["overhead"]
    return (
        f"step {answer['step_s'] / estimate['step_s']:.2f} × the estimate ({estimate['step_s']:.3g} s), "
        f"peak memory {answer['memory_gib']['peak'] / total:.2f} × the estimate ({total:.3g} GiB)"
    )


def tokenize(answer: Answer, found: Any) -> None:
    """Print what was tokenized."""
    out = console()
    out.print(
        f"[bold]{escape(answer['folder'])}[/]  {answer['tokens']:,} tokens of {plural(answer['documents'], 'document')}"
    )
    rate = answer["tokens"] / max(answer["seconds"], 1e-9)
    out.print(
        f"{plural(answer['shards'], 'shard')} of {answer['dtype']}, {answer['seconds']:.1f} s, {rate:,.0f} tokens/s"
    )
    if answer["skipped"] or answer["empty"]:
        out.print(
            f"skipped: {plural(answer['skipped'], 'bad line')}, {plural(answer['empty'], 'document')} without text"
        )
    for line in answer["skipped_lines"]:
        out.print(f"  {escape(line)}")


def samples(answer: Answer, found: Any) -> None:
    """Print conversations with their context and the tokens in the loss, then what happens to all."""
    out = console()
    how = f"{answer['mask_source']}; data.train_on={answer['train_on']}"
    out.print(f"[bold]{escape(answer['dataset'])}[/]  tokenizer {escape(answer['tokenizer'])}; {escape(how)}")
    for one in answer["samples"]:
        cut = f", {one['truncated_tokens']:,} more are truncated" if one["truncated_tokens"] else ""
        dropped = f"; [yellow]dropped: {escape(one['dropped'])}[/]" if one["dropped"] else ""
        counts = f"{plural(one['tokens'], 'token')}, {one['target_tokens']:,} in the loss{cut}{dropped}"
        out.print(f"\n{escape(one['where'])}  {counts}")
        for span in one["spans"]:
            label, style = ("loss", "green") if span["in_loss"] else ("context", "dim")
            for place, line in enumerate(span["text"].removesuffix("\n").split("\n")):
                out.print(f"[{style}]{'' if place else label:<8}| {escape(line)}[/]")
    packed = "packed into" if answer["packing"] else "padded to"
    used = f"{answer['kept']:,} of {plural(answer['rows'], 'conversation')} used"
    out.print(
        f"\n{used} ({answer['truncated']:,} of them truncated), {answer['dropped']:,} dropped; "
        f"the longest has {answer['longest']:,} tokens, data.seq_length is {answer['seq_length']:,}"
    )
    rest = answer["dropped"] - len(answer["dropped_rows"])
    for line in (*answer["dropped_rows"], *([f"{rest:,} more"] if rest > 0 else [])):
        out.print(f"  [yellow]dropped[/] {escape(line)}")
    if answer["duplicates"]:
        out.print(f"{plural(answer['duplicates'], 'repeated conversation')}")
    out.print(
        f"{answer['tokens']:,} tokens, {answer['target_tokens']:,} in the loss; {packed} "
        f"{plural(answer['samples_per_epoch'], 'sample')} per epoch, {answer['real_tokens']:.0%} of them not padding"
    )


def generate(answer: Answer, found: Any) -> None:
    """Print the generated text and nothing else, so that it can be piped."""
    console().print(answer["text"], markup=False)


def evaluate(answer: Answer, found: Any) -> None:
    """Print the perplexity."""
    measured = f"loss {answer['loss']:.4f}"
    if answer["perplexity"] is not None:
        measured = f"perplexity {answer['perplexity']:.4g} ({measured})"
    part = f" ({answer['part']})" if answer["part"] else ""
    if answer["base"]:
        console().print(f"{escape(answer['base'])}, the model that {escape(answer['source'])} started from:")
    console().print(
        f"{measured} over {answer['tokens']:,} tokens of {plural(answer['samples'], 'sample')} of "
        f"{escape(answer['dataset'])}{escape(part)}"
    )
    if answer["seq_length"]:
        console().print(f"samples of at most {answer['seq_length']:,} tokens (data.seq_length)")
    available = answer["available"] or 0
    if available > answer["samples"]:
        console().print(f"the dataset has {plural(available, 'sample')}; --samples {available} uses all")


def convert(answer: Answer, found: Any) -> None:
    """Print what was written."""
    gib = answer["bytes"] / 1024**3
    console().print(
        f"{escape(str(answer['folder']))}  {plural(answer['files'], 'file')}, {gib:.3g} GiB, {answer['dtype']}"
    )


FEW_ROWS = 5


def accuracy(answer: Answer, found: Any) -> None:
    """Print the error of the cost model."""
    out, step, memory, fit = console(), answer["step_time"], answer["memory"], answer["fit"]
    out.print(f"{answer['predicted']:,} of {answer['rows']:,} rows predicted")
    for name, part in (("step time", step), ("memory", memory)):
        if not part["rows"]:
            out.print(f"{name}: no row measured it")
            continue
        count = f"{part['rows']:,} row{'s' * (part['rows'] > 1)}"
        high = f", 90th percentile {part['p90_abs_pct']} %" if part["rows"] > 1 else ""
        out.print(f"{name}: {'median ' * (part['rows'] > 1)}|error| {part['median_abs_pct']} %{high} ({count})")
    counts = [
        f"{fit[f'{key}_called_{key}']} of {fit[f'{key}_rows']} {what}"
        for key, what in (("ok", "that ran are predicted to fit"), ("oom", "that ran out of memory are predicted to"))
        if fit[f"{key}_rows"]
    ]
    if counts:
        out.print("fits: " + "; ".join(counts))
    rows = [
        (source, str(found["rows"]), f"{found['median_abs_pct']}", f"{found['bias_pct']:+}")
        for source, found in step["by_source"].items()
    ]
    if rows:
        table(rows, "source", "rows", "step time, median |error| %", "bias %")
    if 0 < answer["predicted"] < FEW_ROWS:
        out.print(f"[dim]{answer['predicted']} rows are few: the median says little about other runs[/]")
    for note in answer["notes"]:
        out.print(f"[dim]note: {escape(note)}[/]")
    for reason, count in answer["unsupported"].items():
        out.print(f"[dim]{count} not predicted: {escape(reason)}[/]")


bench = train


def share(answer: Answer, found: Any) -> None:
    """Print what was written for a pull request."""
    out, row, speed = console(), answer["row"], answer["tokens_per_s_per_gpu"]
    memory = f", peak {answer['peak_gib']:.1f} GiB" if answer["peak_gib"] is not None else ""
    out.print(f"[bold]{escape(answer['file'])}[/]  {row['model']} on {row['n_gpus']}x{row['gpu']}, {row['framework']}")
    out.print(
        f"{speed['median']:,.0f} tokens/s per GPU ({speed['low']:,.0f} to {speed['high']:,.0f}, p10 to p90 "
        f"of {plural(answer['steps'], 'step')}){memory}"
    )
    out.print(f"command: {escape(answer['command'])}")
    for note in answer["notes"]:
        out.print(f"[dim]{escape(note)}[/]")
