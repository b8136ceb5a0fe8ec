"""Execute generated Megatron-LM jobs as far as a CPU allows: parse and validate the arguments, build the model, count.

PYTHONPATH=src:. python -m benchmarks.against.megatron_model --checkout MEGATRON_LM --site FOLDER --out FILE

MEGATRON_LM is a checkout of Megatron-LM; FOLDER contains what it imports besides torch (pip install --target FOLDER
--no-deps triton omegaconf antlr4-python3-runtime==4.9.3 einops psutil pyyaml). bash runs the command of `meshwright
launch` with a torchrun that starts this module in place of the ranks. GPUs and Transformer Engine are mocked; the model
has the modules of `--transformer-impl local`, which have the same parameters, on the meta device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
SHORT = ("layout.pp=1", "layout.vp=1", "layout.pp_schedule=1f1b", "layout.stage_layers=[]")
JOBS = (
    ("llama3_8b_pretrain_config", "8xH100", ()),
    ("llama31_405b_pretrain_config", "", (*SHORT, "architecture.layers=2")),
    ("qwen3_8b_pretrain_config", "8xH100", ()),
    ("qwen3_30b_a3b_pretrain_config", "16xH100", ("architecture.layers=2",)),
    ("deepseek_v3_pretrain_config", "", (*SHORT, "architecture.layers=4", "train.mtp_loss=0")),
)
"""Recipe, GPUs (its own if empty), overrides: dense, RoPE scaling, query and key norms, experts, latent attention.

Not built here: prediction heads and latent attention without a low-rank query, whose modules need
Transformer Engine.
"""
ON_CPU = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "tp_comm_overlap": False,
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_token_dispatcher_type": "alltoall",
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "cuda_graph_impl": "none",
    "cross_entropy_loss_fusion": False,
    "bias_swiglu_fusion": False,
    "recompute_granularity": None,
    "recompute_modules": None,
}
"""Arguments replaced after validation: the whole model on one rank, without kernels that need a GPU."""
FACTS = (
    "rotary_base", "norm_epsilon", "layernorm_epsilon", "use_rope_scaling", "rope_scaling_factor",
    "rotary_scaling_factor", "mscale", "mscale_all_dim", "qk_layernorm", "kv_channels", "num_query_groups",
    "padded_vocab_size", "untie_embeddings_and_output_weights", "moe_router_score_function",
    "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk", "exit_signal_handler",
    "save_interval",
)  # fmt: skip
RANK = """#!/bin/bash
exec {python} -m benchmarks.against.megatron_model {site} --checkout {checkout} --report "$REPORT" -- "$@"
"""


def main() -> None:
    options, words = _options()
    if options.report:
        _rank(options, words)
        return
    if not _installed(options):
        print("megatron-lm: no checkout, or triton and omegaconf are not installed in --site")
        return
    rows = [run_job(options.checkout, options.site, *job) for job in JOBS]
    for row in rows:
        same = "equal" if row["built"] == row["ours"] else f"NOT EQUAL {row['error']}"
        print(f"{row['recipe']}: built {row['built']:,} parameters, ours {row['ours']:,}: {same}")
    if options.out:
        options.out.write_text(json.dumps(_report(options, rows), indent=1) + "\n")
    sys.exit(any(row["built"] != row["ours"] for row in rows))


def _options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="checkout of Megatron-LM")
    parser.add_argument("--site", action="append", default=[], help="folder with its dependencies; repeatable")
    parser.add_argument("--out", type=Path, help="JSON report to write")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    return parser.parse_args(own), sys.argv[len(own) + 2 :]


def _installed(options: argparse.Namespace) -> bool:
    found = any((Path(site) / "triton").exists() for site in options.site)
    return (options.checkout / "pretrain_gpt.py").is_file() and found


def run_job(checkout: Path, site: list[str], recipe: str, gpus: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Launch a recipe with bash and return what its first rank built, beside our own count."""
    from meshwright import frameworks, planner
    from meshwright.clusters import cluster
    from meshwright.launch.build_job import LaunchRequest
    from meshwright.launch.build_job import launch as write_job
    from meshwright.launch.other_frameworks import in_checkout
    from meshwright.recipes import index
    from meshwright.recipes import overrides as override
    from meshwright.recipes.case import model_of

    theirs = frameworks.framework("megatron-lm")
    made = planner.with_engine_strategy(override.apply(index.load(recipe), overrides), theirs.engine)
    model = model_of(made)
    on = cluster(gpus or made.cluster)
    written = frameworks.export(theirs, made, model, on)
    program, _ = in_checkout(written.program, "megatron-lm", str(checkout), local=True)
    # Without findings: a shrunk model leaves most of its GPUs empty, which is the point here.
    job = LaunchRequest(recipe=made, cluster=on, engine=theirs.engine, program=program, files=written.files)
    started = write_job(job, "torchrun", options={"head": "node01"} if on.nodes > 1 else {})
    with tempfile.TemporaryDirectory() as folder:
        found = _start(started.launch.commands[0], Path(folder), checkout, site, on.world)
    ours = model.params.total + (model.params.mtp if made.train.mtp_loss else 0)
    return {"recipe": recipe, "gpus": str(on), "overrides": list(overrides), "ours": ours, **found}


def _start(command: str, folder: Path, checkout: Path, site: list[str], world: int) -> dict[str, Any]:
    launcher, report = folder / "torchrun", folder / "report.json"
    sites = " ".join(f"--site {one}" for one in site)
    launcher.write_text(RANK.format(python=sys.executable, site=sites, checkout=checkout))
    launcher.chmod(0o755)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "REPORT": str(report), "RANK": "0",
           "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}  # fmt: skip
    # The command sets PYTHONPATH to the checkout; what the stand-in for the ranks imports is added behind it.
    script = command.replace("PYTHONPATH=", f"PYTHONPATH={paths}{os.pathsep}", 1)
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, check=False)
    if not report.exists():
        return {"built": 0, "error": (done.stderr or done.stdout)[-1500:], "arguments": {}}
    found: dict[str, Any] = {"error": "", **json.loads(report.read_text())}
    return found


def _rank(options: argparse.Namespace, words: list[str]) -> None:
    """Do what pretrain_gpt.py does first, and write what was built."""
    sys.path[:0] = [str(options.checkout), *options.site]
    from benchmarks.against import Config
    from benchmarks.against.megatron_lm import _machine, prepare

    prepare()
    at = next(index for index, word in enumerate(words) if word.endswith(("pretrain_gpt.py", "pretrain_hybrid.py")))
    config = Config("job", "export", "job", "", gpus="8xH100")
    with _machine(config), mock.patch.object(sys, "argv", words[at:]), contextlib.redirect_stdout(sys.stderr):
        args = _arguments()
        facts = {name: getattr(args, name) for name in FACTS if hasattr(args, name)}
        built = _build(args)
    options.report.write_text(json.dumps({"built": built, "arguments": facts}))


def _arguments() -> Any:
    from megatron.training import arguments, global_vars

    args = arguments.parse_args()
    arguments.validate_args(args, {})
    global_vars.set_args(args)
    if str(args.tokenizer_type).startswith("Null"):
        global_vars.build_tokenizer(args)
    return args


def _build(args: Any) -> int:
    """Return the number of parameters of the model that these arguments build, on one rank without memory."""
    import torch
    from gpt_builders import gpt_builder
    from megatron.core import parallel_state
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.training.arguments import core_transformer_config_from_args
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for name, value in ON_CPU.items():
        setattr(args, name, value)
    args.pipeline_model_parallel_layout, args.virtual_pipeline_model_parallel_size = None, None
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    config = core_transformer_config_from_args(args)
    config.perform_initialization, config.persist_layer_norm = False, False
    no_gpu = (
        mock.patch.object(torch.cuda, "Stream", mock.MagicMock()),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
    )
    init = DotProductAttention.__init__

    def without_widths(self: Any, *words: Any, k_channels: int = 0, v_channels: int = 0, **named: Any) -> None:
        init(self, *words, **named)  # latent attention passes widths that only Transformer Engine's class takes

    kernel = mock.patch.object(DotProductAttention, "__init__", without_widths)  # it has no parameters
    with no_gpu[0], no_gpu[1], kernel, torch.device("meta"):
        model = gpt_builder(args, True, True, config=config)
    return sum(parameter.numel() for parameter in model.parameters())


def _report(options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    head = subprocess.run(
        ["git", "-C", str(options.checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    package = (options.checkout / "megatron" / "core" / "package_info.py").read_text()
    version = ".".join(line.split("=")[1].strip() for line in package.splitlines() if line.startswith(PARTS))
    return {
        "command": "python -m benchmarks.against.megatron_model --checkout MEGATRON_LM --site FOLDER --out FILE",
        "megatron_core": version,
        "commit": head.stdout.strip() if head.returncode == 0 else "exported",
        "python": platform.python_version(),
        "executed": "the launch command under bash; parse_args, validate_args, tokenizer, model config and gpt_builder",
        "jobs": rows,
    }


PARTS = ("MAJOR", "MINOR", "PATCH")

if __name__ == "__main__":
    main()
