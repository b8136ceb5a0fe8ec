"""Compare training steps of every model family with an fp32 eager reference on the same GPU, and save the table.

    python benchmarks/gpu_parity.py --minutes 9 [--workers 4] [--out FILE] [--family NAME]...   (on a GPU)
    python benchmarks/gpu_parity.py --smoke --family llama --most 4                             (on CPU, tiny models)

Cases combine family, compile, packing, micro batch, goal, recompute, precision and loss so that every pair of values
occurs. Each case runs one step of the engine's Trainer on a small model with the family's real head widths. The loss
and the gradient of every tensor are compared with an fp32 step in eager mode. The tolerance is a multiple of the error
that the plainest run in the same precision has (eager, unpacked, nothing recomputed): its rounding noise.

Cases run in child processes, so that a crash (an illegal memory access) fails one case. Results are kept in the file as
they come; cases that it has are skipped, so a run that reached its time limit is continued by the same command.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

RESULTS = ROOT / "benchmarks" / "results" / "gpu_parity.json"
FACTOR = 3.0  # how much larger than the plainest run's error an error may be
LEAST_ERROR = {"loss": 5e-4, "gradient": 3e-3}  # noise that is always allowed, before the factor
MOST_ERROR = 0.5  # of a gradient: never allowed, unless the plainest run's is as large (tokens change experts)
FLOOR = 1e-3  # gradients below this share of the norm of all are compared with it: they are zero up to rounding
CASE_S = 240.0
MARK = "PARITY-RESULT "
BATCH = 4
TOKENS = {False: 1024, True: 64}  # by smoke

TEXT = ("text", "whole")
AXES: dict[str, tuple[Any, ...]] = {
    "compile": (True, False),
    "packed": (True, False),
    "micro_batch": (2, 4, 1),
    "goal": ("pretrain", "sft", "lora", "qlora"),
    "recompute": ("selective", "none", "full"),
    "precision": ("bf16", "fp8_tensor", "fp8_row"),
    "loss": ("fused_linear", "vocab_parallel", "chunked"),
}
WITH_IMAGES_ONLY = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe")  # transformers has no text-only class
PLAIN: dict[str, Any] = {
    "compile": False,
    "packed": False,
    "micro_batch": 2,
    "recompute": "none",
    "loss": "vocab_parallel",
}


@dataclass(frozen=True)
class Case:
    """One training step to compare."""

    family: str
    compile: bool
    packed: bool
    micro_batch: int
    goal: str
    recompute: str
    precision: str
    loss: str

    @property
    def name(self) -> str:
        words = [self.family, "compiled" if self.compile else "eager", "packed" if self.packed else "unpacked"]
        return " ".join([*words, f"mb{self.micro_batch}", self.goal, self.recompute, self.precision, self.loss])

    @classmethod
    def named(cls, name: str) -> Case:
        """Return the case that has a name."""
        family, compiled, packed, micro_batch, *rest = name.split()
        return cls(family, compiled == "compiled", packed == "packed", int(micro_batch.removeprefix("mb")), *rest)


# --- which cases ---------------------------------------------------------------------------------------------------


def families() -> dict[str, tuple[str, str]]:
    """Return the smallest catalogue model of every architecture that the engine trains, with its kind.

    Kinds are text, vision, diffusion, and whole: a text model that runs transformers' own forward pass.
    """
    from meshwright.engine.vision.vision_modules import VISION_MODULES
    from meshwright.models import all_specs, config_named
    from meshwright.recipes.engine_models import is_whole, lacking

    found: dict[str, tuple[float, str, str]] = {}
    for spec in all_specs():
        if lacking(spec):
            continue
        config = config_named(spec.name)
        language = config.get("llm_config")
        kind = str(config.get("model_type") or config.get("_class_name"))
        if isinstance(language, Mapping):
            kind = str(language["model_type"])
        size = float(spec.total_params if hasattr(spec, "total_params") else spec.hidden)
        names = [(kind, "diffusion" if spec.kind == "diffusion" else "whole" if is_whole(spec) else "text")]
        if kind in VISION_MODULES:
            names = [*(names if kind not in WITH_IMAGES_ONLY else ()), (f"{kind}+images", "vision")]
        for name, modality in names:
            if name not in found or size < found[name][0]:
                found[name] = (size, spec.name, modality)
    return {name: (model, modality) for name, (_, model, modality) in sorted(found.items())}


def allowed(case: Mapping[str, Any], modality: str) -> bool:
    """Return whether a combination exists: the rules refuse the others, or they are the same as another one."""
    if case["goal"] == "qlora" and case["precision"] != "bf16":
        return False
    if modality == "diffusion":
        full = case["goal"] in ("pretrain", "sft") and case["precision"] == "bf16"
        return full and not case["packed"] and case["loss"] == "vocab_parallel"
    if modality == "whole":
        return case["precision"] == "bf16" and case["goal"] != "qlora"
    return True


def all_pairs(names: Mapping[str, str]) -> list[Case]:
    """Return cases in which every possible pair of values occurs, those with most new pairs first.

    Pairs of compile and packing count more, because what compiled graphs do with documents was wrong before.
    """
    axes = {"family": tuple(names), **AXES}
    left: dict[tuple[Any, ...], float] = {}
    for (a, values), (b, others) in itertools.combinations(axes.items(), 2):
        for pair in itertools.product(values, others):
            left[(a, pair[0], b, pair[1])] = 3.0 if (True in pair and a != "family") else 1.0
    cases: list[Case] = []
    random = Random(1)  # among equals any: more combinations of three occur
    per_family = {
        family: [
            {"family": family, **dict(zip(AXES, values, strict=True))}
            for values in itertools.product(*AXES.values())
            if allowed(dict(zip(AXES, values, strict=True)), modality)
        ]
        for family, modality in names.items()
    }
    possible = {pair for options in per_family.values() for one in options for pair in _pairs(one)}
    left = {pair: weight for pair, weight in left.items() if pair in possible}
    while left:  # one case per family and round, so that every family has its most valuable case early
        added = False
        for options in per_family.values():
            best = max(options, key=lambda one: sum(left.get(pair, 0.0) for pair in _pairs(one)) + random.random() / 2)
            if any(pair in left for pair in _pairs(best)):
                for pair in _pairs(best):
                    left.pop(pair, None)
                cases.append(Case(**best))
                added = True
        if not added:
            break
    return cases


def _pairs(case: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    for (a, x), (b, y) in itertools.combinations(case.items(), 2):
        yield (a, x, b, y)


# --- one case, in a child process ------------------------------------------------------------------------------------


def recipe_of(case: Case, model: str, modality: str, tokens: int, fp32: bool) -> Any:
    from meshwright.recipes import types

    goal = {"lora": "peft", "qlora": "peft"}.get(case.goal, case.goal)
    return types.Recipe(
        name="gpu-parity",
        model=model,
        goal=goal,
        cluster="1xH200",
        data=types.Data(seq_length=tokens, packing=case.packed, images=modality == "vision", prefetch=0, workers=0),
        train=types.Train(global_batch_size=BATCH, steps=2, per_token_loss=goal != "pretrain" and modality in TEXT),
        optimizer=types.Optimizer(name="adamw", lr=1e-4),
        schedule=types.Schedule(name="constant", warmup_steps=0),
        precision=types.Precision(
            compute="fp32" if fp32 else "bf16", matmul="same" if fp32 or case.precision == "bf16" else case.precision
        ),
        peft=types.Peft(method=case.goal if goal == "peft" else "lora", rank=16, targets=("qkv", "proj", "fc1", "fc2")),
        layout=types.Layout(micro_batch_size=case.micro_batch, recompute=case.recompute),
        kernels=types.Kernels(
            compile=case.compile, loss=case.loss, attention="eager" if fp32 and modality != "whole" else "auto"
        ),
    )


class Documents:
    """Text samples with documents of different lengths in every sample, and a loss mask for fine-tuning."""

    def __init__(self, vocab: int, tokens: int, packed: bool, masked: bool) -> None:
        from meshwright.engine.data.mock import Mock

        self.inner, self.tokens, self.packed, self.masked = Mock(vocab, tokens, 1234), tokens, packed, masked

    def samples(self, numbers: Sequence[int]) -> Any:
        import numpy as np

        random = [np.random.Generator(np.random.Philox(key=[7, number])) for number in numbers]
        counted = np.ones((len(numbers), self.tokens), dtype=bool)
        if self.masked:
            counted = np.stack([r.random(self.tokens) < r.uniform(0.3, 1.0) for r in random])
        borders = np.stack([np.sort(r.integers(1, self.tokens, size=5)) for r in random])
        documents = (np.arange(self.tokens) >= borders[:, :, None]).sum(1)
        if self.packed:
            counted[:, :-1] &= documents[:, 1:] == documents[:, :-1]
        made = self.inner.samples(numbers)
        return replace(made, loss_mask=counted, documents=documents if self.packed else None)


def small_config(recipe: Any, modality: str, smoke: bool, layers: int = 2) -> Any:
    """Return a config of few layers and small widths; real head widths unless `smoke`."""
    from meshwright.engine.diffusion import config as diffusion
    from meshwright.engine.model import config as language
    from meshwright.engine.model_families import family_of

    family = family_of(recipe)
    config = family.config_for(recipe)
    with ExitStack() as stack:
        if not smoke:
            stack.enter_context(mock.patch.dict(language.TINY, _language_sizes(), clear=True))
            stack.enter_context(mock.patch.dict(language.TINY_VISION, {"hidden_size": 256, "intermediate_size": 512}))
            stack.enter_context(mock.patch.dict(diffusion.TINY, DIFFUSION_SIZES))
        return family.tiny(config, max(layers, family.layer_types(config)))


DIFFUSION_SIZES: dict[str, Any] = {
    "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56],
    "ffn_dim": 1024,
    "freq_dim": 256,
    "text_dim": 512,
    "joint_attention_dim": 512,
    "pooled_projection_dim": 256,
}


def _head_width(values: Mapping[str, Any]) -> int:
    width = values.get("head_dim")
    hidden = values.get("hidden_size") or values.get("n_embd")
    heads = values.get("num_attention_heads") or values.get("n_head")
    return int(width or hidden // heads)


def _hidden(values: Mapping[str, Any]) -> int:
    width = _head_width(values)
    return 512 if 512 % width == 0 else 8 * width


def _heads(values: Mapping[str, Any]) -> int:
    return _hidden(values) // _head_width(values) if not values.get("head_dim") else 4


def _kv_heads(values: Mapping[str, Any]) -> int:
    queries = values.get("num_attention_heads") or values.get("n_head")
    heads = _heads(values)
    return heads if values["num_key_value_heads"] == queries else max(1, heads // 2)


def _at_most(name: str, most: int) -> Any:
    return lambda values: min(int(values[name]), most)


def _language_sizes() -> dict[str, Any]:
    return {
        "hidden_size": _hidden,
        "n_embd": _hidden,
        "intermediate_size": 1024,
        "n_inner": 1024,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 256,
        "moe_latent_size": 256,
        "num_attention_heads": _heads,
        "n_head": _heads,
        "num_key_value_heads": _kv_heads,
        "head_dim": _head_width,
        "vocab_size": 4096,
        "num_experts": _at_most("num_experts", 16),
        "n_routed_experts": _at_most("n_routed_experts", 16),
        "num_local_experts": _at_most("num_local_experts", 16),
        "num_experts_per_tok": _at_most("num_experts_per_tok", 4),
        "n_shared_experts": 1,
        "n_group": _at_most("n_group", 4),
        "topk_group": _at_most("topk_group", 2),
        "q_lora_rank": _at_most("q_lora_rank", 256),
        "mamba_num_heads": 8,
        "n_groups": _at_most("n_groups", 8),
        "linear_num_key_heads": 4,
        "linear_num_value_heads": lambda v: 4 * min(2, v["linear_num_value_heads"] // v["linear_num_key_heads"]),
        "sliding_window": _at_most("sliding_window", 256),
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


class Lab:
    """Runs cases on this process's device; keeps the references of one family."""

    def __init__(self, smoke: bool) -> None:
        import torch
        import torch.distributed as dist

        self.smoke = smoke
        self.models = families()
        self.gpu = torch.cuda.is_available() and not smoke
        self.device = torch.device("cuda", 0) if self.gpu else torch.device("cpu")
        if not self.gpu:
            _compile_without_a_compiler()
        dist.init_process_group("nccl" if self.gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.kept: dict[Any, Any] = {}
        self.family = ""

    def compare(self, case: Case) -> dict[str, Any]:
        """Return the errors of a case and of its yardstick, and whether they are within the tolerance."""
        import torch

        if case.family != self.family:
            self.kept.clear()
            self.family = case.family
        found = self.step(case, fp32=False)
        expected = self.reference(case)
        yard_case = replace(case, **PLAIN)
        yard = self.kept.get(("yard", yard_case))
        if yard is None:
            run = found if yard_case == case else self.step(yard_case, fp32=False)
            yard = self.kept["yard", yard_case] = errors(run, self.reference(yard_case))
        row = verdict(errors(found, expected), yard)
        row |= {"found_loss": found["loss"], "expected_loss": expected["loss"], "norm": found["norm"]}
        row["expected_norm"] = expected["norm"]
        if self.gpu:
            row["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        return row

    def reference(self, case: Case) -> dict[str, Any]:
        # Balancing losses of experts are per micro batch, so the reference has the same micro batches.
        plain = replace(case, compile=False, recompute="none", loss="vocab_parallel", precision="bf16")
        if ("fp32", plain) not in self.kept:
            self.kept["fp32", plain] = self.step(plain, fp32=True)
        return self.kept["fp32", plain]  # type: ignore[no-any-return]

    def step(self, case: Case, fp32: bool) -> dict[str, Any]:
        """Run one training step; return loss, norm and gradients by name."""
        import gc

        import torch

        from meshwright.engine.mesh import build_mesh
        from meshwright.engine.model_families import family_of
        from meshwright.engine.worker import set_determinism

        torch._dynamo.reset()
        gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        model, modality = self.models[case.family]
        recipe = recipe_of(case, model, modality, TOKENS[self.smoke], fp32)
        config = small_config(recipe, modality, self.smoke)
        set_determinism(recipe, self.device)  # fp32 matmuls stay fp32 in the reference
        if not fp32 and self.gpu:
            _refuse(recipe, config)
        family = family_of(recipe)
        if modality in TEXT:
            vocab = config.get_text_config().vocab_size
            source: Any = Documents(vocab, TOKENS[self.smoke], case.packed, case.goal != "pretrain")
        else:
            source = family.open_source(recipe, config, False, None)
        mesh = build_mesh(recipe.layout, self.device.type)
        trainer = family.trainer()(recipe, config, mesh, self.device, source)
        try:
            _start_adapters(trainer)
            return _one_step(trainer)
        finally:
            trainer.close()


def _one_step(trainer: Any) -> dict[str, Any]:
    import torch
    from torch.distributed.tensor import DTensor

    gradients: dict[str, torch.Tensor] = {}
    finish = trainer.finish_gradients

    def finish_and_keep() -> torch.Tensor:
        norm: torch.Tensor = finish()
        for stage in trainer.stages:
            for name, parameter in stage.named_parameters():
                value = parameter.grad
                if value is not None:
                    gradients[name] = (value.full_tensor() if isinstance(value, DTensor) else value).float().clone()
        return norm

    trainer.finish_gradients = finish_and_keep
    result = trainer.step(0)
    return {"loss": result.loss, "norm": result.grad_norm, "gradients": gradients}


def _start_adapters(trainer: Any) -> None:
    """Fill the second matrix of adapters, which starts at zero and would make the first one's gradients zero."""
    import torch
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        for stage in trainer.stages:
            for number, (name, parameter) in enumerate(stage.named_parameters()):
                if "lora_B" in name:
                    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    values = torch.randn(local.shape, generator=torch.Generator().manual_seed(number)) * 0.02
                    local.copy_(values.to(local))


def _refuse(recipe: Any, config: Any) -> None:
    """Raise RefusedError for what the rules refuse, as `train` does."""
    from meshwright.engine.validate import validate

    validate(recipe, config, None, 1)


def _compile_without_a_compiler() -> None:
    from torch import nn

    inner = nn.Module.compile

    def compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **{**kwargs, "backend": "aot_eager"})

    nn.Module.compile = compile  # type: ignore[method-assign,assignment]


def errors(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return the relative error of the loss, and of every gradient by name."""
    left, right = found["gradients"], expected["gradients"]
    missing = sorted(set(left) ^ set(right))
    if missing:
        raise ValueError(f"gradients differ in their names: {missing[:3]} and {len(missing) - 1} more")
    total = math.sqrt(sum(float(one.double().pow(2).sum()) for one in right.values()))
    floor = FLOOR * total
    by_name = {
        name: float((left[name].double() - value.double()).norm()) / max(float(value.double().norm()), floor)
        for name, value in right.items()
    }
    return {"loss": abs(found["loss"] - expected["loss"]) / max(abs(expected["loss"]), 1e-6), "gradients": by_name}


def verdict(found: Mapping[str, Any], yard: Mapping[str, Any]) -> dict[str, Any]:
    """Compare errors with those of the yardstick: the same tensor's, or those of most tensors."""
    ordered = sorted(yard["gradients"].values())
    usual = ordered[int(0.75 * (len(ordered) - 1))]
    limits = {
        name: min(FACTOR * max(error, usual, LEAST_ERROR["gradient"]), max(MOST_ERROR, 1.5 * error))
        for name, error in yard["gradients"].items()
    }
    ratios = {
        name: error / limits[name] if math.isfinite(error) else math.inf for name, error in found["gradients"].items()
    }
    worst = max(ratios, key=lambda name: ratios[name])
    loss_limit = FACTOR * max(yard["loss"], LEAST_ERROR["loss"])
    loss_ok = math.isfinite(found["loss"]) and found["loss"] <= loss_limit
    return {
        "status": "ok" if loss_ok and ratios[worst] <= 1.0 else "wrong",
        "loss_error": found["loss"],
        "loss_limit": loss_limit,
        "worst_gradient": worst,
        "gradient_error": found["gradients"][worst],
        "gradient_limit": limits[worst],
        "tensors": len(ratios),
        "tensors_wrong": sum(ratio > 1.0 for ratio in ratios.values()),
    }


def child(smoke: bool) -> None:
    """Answer cases from stdin with results on stdout, one JSON value per line."""
    import warnings

    warnings.simplefilter("ignore")
    from meshwright.errors import InputError
    from meshwright.rules import RefusedError

    lab = Lab(smoke)
    for line in sys.stdin:
        case, started = Case(**json.loads(line)), time.monotonic()
        try:
            row = lab.compare(case)
        except RefusedError as error:
            row = {"status": "refused", "error": str(error)[:300]}
        except InputError as error:
            row = {"status": "refused", "error": str(error)[:300]}
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
            row = {"status": "failed", "error": text[:600]}
            if "CUDA error" in text or "illegal memory" in text:  # the context is lost
                print(MARK + json.dumps(row), flush=True)
                os._exit(3)
        row["seconds"] = round(time.monotonic() - started, 1)
        print(MARK + json.dumps(row), flush=True)


# --- the parent ----------------------------------------------------------------------------------------------------


class Worker(threading.Thread):
    """Sends cases to a child process, and starts another when it ends or hangs."""

    script = __file__
    case_s = CASE_S
    threads = 1.0  # share of the worker's cores for the compiler

    def __init__(self, number: int, batches: queue.Queue[list[Case]], table: Table, args: argparse.Namespace) -> None:
        super().__init__(daemon=True)
        self.number, self.batches, self.table, self.args = number, batches, table, args
        self.process: subprocess.Popen[str] | None = None
        self.log = Path(args.logs) / f"{Path(self.script).stem}_{number}.log"

    def run(self) -> None:
        while time.monotonic() < self.args.ends:
            try:
                batch = self.batches.get_nowait()
            except queue.Empty:
                break
            for case in batch:
                if time.monotonic() < self.args.ends:
                    row = self.ask(case)
                    # A case that was running when the time was over has no result.
                    if row["status"] != "crashed" or time.monotonic() < self.args.ends:
                        self.table.add(case, row)
        self.stop()

    def ask(self, case: Case) -> dict[str, Any]:
        if self.process is None or self.process.poll() is not None:
            self.start_child()
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        timer = threading.Timer(self.case_s, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps(case.__dict__) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                if line.startswith(MARK):
                    row: dict[str, Any] = json.loads(line.removeprefix(MARK))
                    return row
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        code = self.process.wait()
        tail = self.log.read_text(errors="replace")[-500:]
        return {"status": "crashed", "error": f"the process ended with {code} (or after {self.case_s:.0f} s): {tail}"}

    def start_child(self) -> None:
        cores = (os.cpu_count() or 1) // self.args.workers
        settings = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, int(cores * self.threads)))}
        command = [sys.executable, self.script, "--child", *(["--smoke"] if self.args.smoke else [])]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **settings},
            )

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()


class Table:
    """The result file: rows by case, written after every one."""

    def __init__(self, path: Path, total: int) -> None:
        self.path, self.total, self.lock = path, total, threading.Lock()
        self.content = json.loads(path.read_text()) if path.exists() else {}
        self.rows: dict[str, dict[str, Any]] = {row["case"]: row for row in self.content.get("rows", [])}

    def add(self, case: Case, row: dict[str, Any]) -> None:
        with self.lock:
            self.rows[case.name] = {"case": case.name, **row}
            shown = row.get("error") or (
                f"loss {row['found_loss']:.4f} ({row['expected_loss']:.4f}), gradients {row['gradient_error']:.1e} of "
                f"{row['gradient_limit']:.1e} allowed, {row['tensors_wrong']} of {row['tensors']} tensors wrong"
            )
            print(f"{len(self.rows)}/{self.total} {row['status']:<8} {case.name:<70} {shown[:170]}", flush=True)
            self.write()

    def write(self) -> None:
        counts: dict[str, int] = {}
        for row in self.rows.values():
            counts[row["status"]] = counts.get(row["status"], 0) + 1
        made = {"factor": FACTOR, **machine(), "cases": self.total, "counts": counts}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({**made, "rows": list(self.rows.values())}, indent=1) + "\n")


def machine() -> dict[str, Any]:
    from importlib.metadata import version

    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = {name: version(name) for name in ("torch", "transformers")}
    return {"date": time.strftime("%Y-%m-%d"), "device": gpu, **versions}


def batches_of(cases: Sequence[Case], rounds: int = 2) -> list[list[Case]]:
    """Return the cases in batches of one family: first the first cases of every family, then the next ones."""
    by_family: dict[str, list[Case]] = {}
    for case in cases:
        by_family.setdefault(case.family, []).append(case)
    longest = max((len(found) for found in by_family.values()), default=0)
    batches = [found[at : at + rounds] for at in range(0, longest, rounds) for found in by_family.values()]
    return [batch for batch in batches if batch]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no case after this time")
    parser.add_argument("--workers", type=int, default=4, help="child processes that share the GPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--family", action="append", help="only this family; may be given several times")
    parser.add_argument("--only", action="append", default=[], help="AXIS=VALUE: only cases with this value")
    parser.add_argument("--most", type=int, default=0, help="at most this many cases")
    parser.add_argument("--again", action="store_true", help="run cases again that are not ok in the file")
    parser.add_argument("--smoke", action="store_true", help="tiny models on CPU, compiled without a compiler")
    parser.add_argument("--list", action="store_true", help="print the cases only")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.smoke)
        return 0
    known = {name: kind for name, (_, kind) in families().items()}
    if unknown := [name for name in args.family or () if name not in known]:
        parser.error(f"no family {', '.join(unknown)}; families: {', '.join(known)}")
    cases = pairs = all_pairs(known)
    if args.again:  # those of an earlier set of pairs too
        kept = Table(args.out, 0).rows
        older = {name for name, row in kept.items() if row["status"] not in ("ok", "refused")}
        cases = [*map(Case.named, sorted(older)), *(case for case in cases if case.name not in older)]
    cases = [case for case in cases if not args.family or case.family in args.family]
    wanted = [one.partition("=")[::2] for one in args.only]
    cases = [case for case in cases if all(str(getattr(case, axis)).lower() == value.lower() for axis, value in wanted)]
    cases = cases[: args.most or None]
    if args.list:
        print("\n".join(case.name for case in cases))
        print(f"{len(cases)} cases, {len(known)} families")
        return 0
    table = Table(args.out, len(pairs))
    done = {name for name, row in table.rows.items() if not args.again or row["status"] == "ok"}
    args.ends = time.monotonic() + 60 * args.minutes
    args.logs = os.environ.get("OUT") or "/tmp"
    batches: queue.Queue[list[Case]] = queue.Queue()
    for batch in batches_of([case for case in cases if case.name not in done]):
        batches.put(batch)
    workers = [Worker(number, batches, table, args) for number in range(args.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    table.write()
    counts: dict[str, int] = json.loads(args.out.read_text())["counts"]
    shown = ", ".join(f"{number} {status}" for status, number in counts.items())
    print(f"{len(table.rows)} cases, {table.total} in today's pairs: {shown}")
    return 0 if not {"wrong", "failed", "crashed"} & set(counts) else 1


if __name__ == "__main__":
    sys.exit(main())
