"""The table of verbs: what each takes, returns and is called on every surface.

Handlers are named by module and function, so that a command imports only what it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal

import msgspec

from meshwright.api import requests, run_requests
from meshwright.api.inputs import ALL, CLI, CLI_MCP, Request, Surface, json_schema
from meshwright.api.verb_function import VerbFunction

Group = Literal["Plan", "Check", "Run", "Inspect", "Serve", ""]
GROUPS: tuple[Group, ...] = ("Plan", "Check", "Run", "Inspect", "Serve")
HTTP: tuple[Surface, ...] = ("http",)
CLI_HTTP: tuple[Surface, ...] = ("cli", "http")
RUN_EXITS = (
    "0 success, 1 the rules reject the layout, 2 bad input, 3 the run failed, 75 stopped (Ctrl-C, SIGTERM) and saved, "
    "130 Ctrl-C with nothing to save"
)


class Verb(msgspec.Struct, frozen=True):
    """One verb."""

    name: str
    group: Group
    request: type[Request]
    function: str  # module.function of meshwright.api
    responds: str = ""  # what makes the response: a function of the same module, or module.function; empty: its result
    surfaces: tuple[Surface, ...] = ALL
    examples: tuple[str, ...] = ()  # command lines
    calls: tuple[Mapping[str, Any], ...] = ()  # arguments of example calls over MCP
    exits: str = ""
    path: str = ""  # HTTP path; /name if empty
    slow: bool = False  # takes a second: the web server keeps a worker free of these
    private: bool = False  # the response quotes a user's log: the web server does not cache it
    runs: bool = False  # runs for long and imports torch

    @property
    def summary(self) -> str:
        """Return the verb in one imperative sentence."""
        return self._text.partition("\n")[0]

    @property
    def description(self) -> str:
        """Return what the summary leaves out; may be empty."""
        return self._text.partition("\n")[2].strip()

    @property
    def _text(self) -> str:
        return inspect.cleandoc(self.request.__doc__ or "")

    def named(self, name: str) -> Any:
        """Return a function of meshwright.api, named as module.function or as one of the verb's own module."""
        module, _, function = name.rpartition(".")
        return getattr(import_module(f"meshwright.api.{module or self.function.partition('.')[0]}"), function)

    @property
    def handler(self) -> VerbFunction[Any, Any, Any]:
        """Return the Python function of this verb."""
        found: VerbFunction[Any, Any, Any] = self.named(self.function)
        return found

    @property
    def response(self) -> type[msgspec.Struct]:
        """Return the type of this verb's response."""
        function = self.named(self.responds) if self.responds else self.handler.handle
        found: type[msgspec.Struct] = getattr(import_module(function.__module__), function.__annotations__["return"])
        return found

    def handle(self, request: Request) -> Any:
        """Run a validated request and return its Python result."""
        if self.runs:
            from meshwright.engine.warning_filters import no_needless_warnings

            no_needless_warnings()
        return self.handler.handle(request)

    def respond(self, result: Any, request: Request) -> Any:
        """Return the response for the result of a request."""
        response = self.named(self.responds)(result, request) if self.responds else result
        notes = getattr(request, "notes", ())
        if notes and "notes" in response.__struct_fields__:
            present = response.notes if response.notes is not msgspec.UNSET else ()
            response = msgspec.structs.replace(response, notes=[*notes, *present])
        return response

    def answer(self, request: Request) -> Any:
        """Run a validated request and return its response."""
        return self.respond(self.handle(request), request)

    def input_schema(self, surface: Surface) -> dict[str, Any]:
        """Return the JSON Schema of the inputs, with examples."""
        return json_schema(self.request, surface) | {"examples": [dict(call) for call in self.calls]}


_OUT_OF_MEMORY = """\
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of \
79.11 GiB of which 2.10 GiB is free. Of the allocated memory 74.20 GiB is allocated by PyTorch, and 1.05 GiB is \
reserved by PyTorch but unallocated.
"""
_DEEPSPEED = (
    '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, "fp16": {"enabled": true}, '
    '"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}'
)

_MEGATRON = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 128256 "
    "--seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 128 --lr 3e-4 --bf16 "
    "--tensor-model-parallel-size 2 --train-iters 1000 --use-distributed-optimizer\n"
)

_TABLE = (
    Verb(
        *("recommend", "Plan", requests.Recommend, "planning.recommend", "plan_responses.plan_response"),
        examples=(
            "meshwright recommend llama3-8b --gpus 8xH100 --goal sft --explain",
            "meshwright recommend ./config.json --gpus auto --goal peft",
            "meshwright recommend qwen3-30b-a3b --gpus 4x8xH100 --goal pretrain --seq 32k layout.ep=8",
            "meshwright recommend llama3-70b --gpus 64xGB200 --goal pretrain --benchmark",
            "meshwright recommend llama3-70b --gpus 64xH100 --goal pretrain --dry-run",
        ),
        calls=({"model": "llama3-8b", "gpus": "8xH100", "goal": "sft"},),
    ),
    Verb(
        *("plan", "Plan", requests.Plan, "planning.plan", "plan_responses.plans_response"),
        examples=(
            "meshwright plan llama3-70b --gpus 64xH100 --goal pretrain",
            "meshwright plan qwen3_30b_a3b_pretrain_config --gpus 4x8xH200 --top 10",
            "meshwright plan kimi-k2 --gpus 1024xGB200 --goal pretrain layout.tp=1 --json",
        ),
        calls=({"target": "llama3-8b", "gpus": "16xA100-40", "goal": "pretrain", "top": 2},),
        slow=True,
    ),
    Verb(
        *("size", "Plan", requests.Size, "sizing.size", "sizes_response"),
        examples=(
            "meshwright size llama3-70b --goal pretrain --gpu H100",
            "meshwright size deepseek-v3 --goal pretrain --gpu GB200 --tokens 15T --price 3",
        ),
        calls=(
            {
                "model": "llama3-8b",
                "goal": "pretrain",
                "gpu": "H100",
                "tokens": "1T",
                "price": 2.5,
                "overrides": ["layout.pp=1"],
            },
        ),
        slow=True,
    ),
    Verb(
        *("estimate", "Plan", requests.Estimate, "planning.estimate", "plan_responses.estimate_response"),
        examples=(
            "meshwright estimate llama3_70b_pretrain_config",
            "meshwright estimate llama3-8b --gpus 8xH100 layout.tp=2 layout.recompute=full",
            "meshwright estimate llama3_70b_pretrain_config --gpus 64xH200 --engine megatron --json",
        ),
        calls=({"target": "llama3_8b_pretrain_config", "gpus": "8xH100", "overrides": ["layout.recompute=full"]},),
    ),
    Verb(
        *("compare", "Plan", requests.Compare, "comparison.compare", "compare_responses.compare_response"),
        examples=(
            "meshwright compare llama3-8b --gpus 8xH100 --goal sft --engines all",
            "meshwright compare pretrain_llama.sh --gpus 4x8xH100 --engines megatron,torchtitan",
            "meshwright compare llama3_70b_pretrain_config my_recipe.toml --gpus 64xH100",
            "meshwright compare runs/lr1e-4 runs/lr3e-4",
        ),
        calls=({"target": "llama3-8b", "gpus": "8xH100", "goal": "sft", "engines": "meshwright,megatron"},),
        exits="0 one of them can run and fits, or runs were compared, 1 none does, 2 bad input",
        slow=True,
    ),
    Verb(
        *("check", "Check", requests.Check, "checks.check", "check_responses.check_response"),
        examples=(
            "meshwright check llama3_8b_pretrain_config --gpus 16xA100-80",
            "meshwright check my_recipe.toml",
            "meshwright check train_llama.sh --gpus 8x8xH100",
            "meshwright check automodel.yaml --json",
            "meshwright check ds_config.json --model llama3-8b --gpus 8xH100",
        ),
        calls=(
            {"text": _DEEPSPEED, "name": "ds_config.json", "model": "llama3-8b", "gpus": "8xH100"},
            {"target": "llama3_70b_pretrain_config", "gpus": "16xA100-80"},
        ),
    ),
    Verb(
        *("export", "Check", requests.Export, "exports.export", "export_response"),
        examples=(
            "meshwright export llama3_8b_pretrain_config --to torchtitan --gpus 8xH100",
            "meshwright export my_recipe.toml --to automodel --out configs",
            "meshwright export llama3_70b_pretrain_config --to megatron-lm --gpus 8x8xH100 layout.tp=8",
        ),
        calls=({"target": "llama3_8b_pretrain_config", "to": "torchtitan", "gpus": "8xH100"},),
    ),
    Verb(
        *("import", "Check", requests.Import, "imports.import_file", "import_response"),
        examples=(
            "meshwright import pretrain_llama.sh --gpus 4x8xH100 --out llama.toml",
            "meshwright import torchtitan.toml --gpus 8xH100",
            "meshwright import ds_config.json --model llama3-8b --gpus 8xH100 --goal sft data.seq_length=4096",
        ),
        calls=({"text": _MEGATRON, "name": "train.sh", "gpus": "8xH100"},),
        exits="0 the recipe, 1 settings with errors were left out, 2 bad input",
    ),
    Verb(
        *("dryrun", "Check", run_requests.DryRun, "dry_run.dryrun", "dryrun_response"),
        surfaces=CLI,
        examples=(
            "meshwright dryrun llama3_70b_pretrain_config --gpus 64xH100",
            "meshwright dryrun llama3_8b_sft_config --gpus 8xH100 layout.recompute=full --plot memory.svg",
            "meshwright dryrun qwen3_30b_a3b_pretrain_config --gpus 16xH100 layout.ep=8 --json",
            "meshwright dryrun my_recipe.toml --exact",
        ),
        exits="0 it fits, 1 it does not fit or the rules reject it, 2 bad input, 3 the dry run failed",
        runs=True,
    ),
    Verb(
        *("rehearse", "Check", run_requests.Rehearse, "rehearsal.rehearse", "rehearsal_response"),
        surfaces=CLI,
        examples=(
            "meshwright rehearse llama3_70b_pretrain_config --gpus 64xH100",
            "meshwright rehearse llama3_8b_pretrain_config --gpus 8xH100 --alternatives --trace step.json",
            "meshwright rehearse qwen3_30b_a3b_pretrain_config --gpus 16xH100 layout.ep=8 --out rehearsal.json",
            "meshwright rehearse llama3_8b_pretrain_config --gpus 4xH100 --device cpu --tiny",
        ),
        exits="0 it fits, 1 it does not fit the cluster's GPUs or the rules reject it, 2 bad input or no GPU here, "
        "3 the rehearsal failed, 130 Ctrl-C",
        runs=True,
    ),
    Verb(
        *("doctor", "Check", run_requests.Doctor, "diagnosis.diagnose", "doctor_response"),
        private=True,
        examples=(
            "meshwright doctor runs/llama3_8b_pretrain_config-20260101-120000",
            "meshwright doctor slurm-4711.out --gpus 64xH100",
            "meshwright doctor train.log --recipe llama3_8b_sft_config --gpus 8xH100 layout.tp=2",
            "meshwright doctor runs/on-8-nodes --baseline runs/on-1-node --json",
        ),
        calls=({"log": _OUT_OF_MEMORY, "recipe": "llama3_8b_pretrain_config", "gpus": "8xH100"},),
        exits="0 no findings, 1 findings, 2 bad input",
    ),
    Verb(
        *("train", "Run", run_requests.Train, "training.train", "train_response"),
        surfaces=CLI,
        examples=(
            "meshwright train llama3_8b_pretrain_config --tiny --nproc 2",
            "meshwright train llama3_8b_sft_config --dataset mock --nproc 8 train.steps=100",
            "meshwright train qwen3_30b_a3b_pretrain_config --nproc 8 layout.micro_batch_size=auto",
            "torchrun --nproc-per-node 8 -m meshwright train llama3_8b_pretrain_config --dataset mock",
        ),
        exits=RUN_EXITS,
        runs=True,
    ),
    Verb(
        *("bench", "Run", run_requests.Bench, "training.bench", "train_response"),
        surfaces=CLI,
        examples=(
            "meshwright bench llama3_8b_pretrain_config --nproc 8",
            "meshwright bench qwen3_600m_pretrain_config train.steps=20 layout.micro_batch_size=auto",
            "meshwright bench qwen3_30b_a3b_pretrain_config --tiny --nproc 2",
        ),
        exits=RUN_EXITS,
        runs=True,
    ),
    Verb(
        *("launch", "Run", run_requests.Launch, "job_launch.launch", "launch_response"),
        surfaces=CLI,
        examples=(
            "meshwright launch llama3_8b_pretrain_config --scheduler slurm --gpus 2x8xH100 --time 1-00:00:00",
            "meshwright launch my_recipe.toml --scheduler slurm --out runs/mine --submit --watch",
            "meshwright launch llama3_8b_sft_config --scheduler hosts --gpus 2x8xH100 --hosts node01,node02",
            "meshwright launch llama3_8b_sft_config --scheduler kubernetes --kind jobset --image IMAGE --write jobs",
            "meshwright launch llama3_70b_pretrain_config --to megatron-lm --scheduler slurm --gpus 8x8xH100",
            "meshwright launch llama3_8b_pretrain_config --scheduler slurm --tiny --cpu --gpus 2 --submit --watch",
        ),
        exits="0 success, 1 it cannot start or does not fit, 2 bad input, 3 the job was rejected or did not complete",
    ),
    Verb(
        *("tokenize", "Run", run_requests.Tokenize, "post_training.tokenize", ""),
        surfaces=CLI,
        examples=(
            "meshwright tokenize corpus.jsonl --tokenizer ./Llama-3-8B --out tokens",
            "meshwright tokenize books/*.txt --tokenizer bytes --out tokens --workers 2",
            "meshwright train llama3_8b_pretrain_config --dataset tokens --nproc 8",
        ),
        runs=True,
    ),
    Verb(
        *("samples", "Run", run_requests.Samples, "show_samples.samples", ""),
        surfaces=CLI,
        examples=(
            "meshwright samples llama3_8b_sft_config --dataset chats.jsonl data.tokenizer=./Llama-3-8B",
            "meshwright samples qwen3_600m_sft_config --dataset chats.jsonl --count 5 data.tokenizer=bytes",
        ),
        runs=True,
    ),
    Verb(
        *("generate", "Run", run_requests.Generate, "post_training.generate", ""),
        surfaces=CLI,
        examples=(
            'meshwright generate runs/my-run "The capital of France is"',
            'meshwright generate ./exported "Write a haiku" --temperature 0.8 --max-tokens 100',
        ),
        runs=True,
    ),
    Verb(
        *("evaluate", "Run", run_requests.Evaluate, "post_training.evaluate", ""),
        surfaces=CLI,
        examples=(
            "meshwright evaluate runs/my-run",
            "meshwright evaluate ./Llama-3-8B --dataset tokens --nproc 8 data.seq_length=8192",
        ),
        runs=True,
    ),
    Verb(
        *("convert", "Run", run_requests.Convert, "post_training.convert", ""),
        surfaces=CLI,
        examples=(
            "meshwright convert runs/my-run exported",
            "meshwright convert runs/my-lora-run merged --merge",
            "meshwright convert ./Llama-3-8B small-files --shard-gib 1 --dtype bf16",
        ),
        runs=True,
    ),
    Verb(
        *("inspect", "Inspect", requests.Inspect, "inspection.inspect", "inspect_response"),
        examples=(
            "meshwright inspect deepseek-v3",
            "meshwright inspect ./config.json --seq 32k",
            "meshwright inspect Qwen/Qwen3-30B-A3B --json",
            "meshwright inspect gemma3-27b --seq 128k --plot gemma3.svg",
        ),
        calls=({"model": "qwen3-30b-a3b", "seq": 32768},),
        exits="0 the model was read, 2 bad input",
    ),
    Verb(
        *("recipes", "Inspect", requests.Recipes, "catalogues.find_recipes", "recipes_response"),
        examples=(
            "meshwright recipes llama --goal sft",
            'meshwright recipes "qwen3 moe 8xH100"',
            "meshwright recipes gb200 --benchmark --json",
        ),
        calls=({"query": "llama3 8b", "goal": "sft"},),
    ),
    Verb(
        *("recipe", "Inspect", requests.RecipeRequest, "catalogues.recipe", "recipe_response"),
        surfaces=CLI_HTTP,
        examples=(
            "meshwright recipe llama3_70b_pretrain_config",
            "meshwright recipe llama3_8b_sft_config layout.tp=4 --format yaml",
        ),
        path="/recipes/{name}",
    ),
    Verb(
        *("models", "Inspect", requests.Models, "model_list.model_catalogue", "models_response"),
        examples=(
            "meshwright models qwen3",
            "meshwright models --gpus 1xRTX4090 --goal lora",
            "meshwright models ./config.json --json",
        ),
        calls=({"query": "qwen3 moe"},),
    ),
    Verb(
        *("gpus", "Inspect", requests.GpuCatalogue, "catalogues.gpu_catalogue", "gpus_response"),
        examples=("meshwright gpus", "meshwright gpus h100", "meshwright gpus p5.48xlarge", "meshwright gpus --json"),
        calls=({"query": "H100 SXM"},),
    ),
    Verb(
        *("rules", "Inspect", requests.Rules, "catalogues.rule_catalogue", "rules_response"),
        examples=(
            "meshwright rules",
            "meshwright rules moe",
            "meshwright rules automodel",
            "meshwright rules --pitfalls",
        ),
        calls=({"query": "heads"},),
    ),
    Verb(
        *("explain", "Inspect", requests.Explain, "explanations.explain", "explain_response"),
        surfaces=CLI_MCP,
        examples=(
            "meshwright explain 'CUDA graph accepts only Tensor inputs'",
            "meshwright explain layout.recompute",
            "meshwright explain --tensor-model-parallel-size",
            "meshwright explain heads.attention --json",
        ),
        calls=({"about": "heads.attention"}, {"about": "layout.recompute"}, {"about": "speed.low-mfu"}),
    ),
    Verb(
        *("accuracy", "Inspect", requests.Accuracy, "measure.accuracy", "accuracy_response"),
        surfaces=CLI_HTTP,
        examples=(
            "meshwright accuracy",
            "meshwright accuracy --template > runs.csv",
            "meshwright accuracy runs.csv --json",
        ),
        slow=True,
    ),
    Verb(
        *("calibrate", "Inspect", requests.Calibrate, "measure.calibrate", "calibrate_response"),
        surfaces=CLI,
        examples=(
            "meshwright calibrate --out mine.toml",
            "meshwright calibrate runs/first runs/second --out mine.toml",
            "meshwright calibrate runs.csv --out mine.toml",
            "torchrun --nproc-per-node=8 -m meshwright calibrate --out mine.toml",
        ),
        runs=True,
    ),
    Verb(
        *("share", "Inspect", run_requests.Share, "sharing.share", ""),
        surfaces=CLI,
        examples=(
            "meshwright share runs/llama3_8b_pretrain_config-20260101-120000",
            "meshwright share slurm-4711.out --recipe train.sh --gpus 8x8xH100 --framework-version core_r0.14.0",
            "meshwright share runs/mine --by 'Lab A' --out benchmarks/data/contributed/lab-a.csv",
        ),
        exits="0 the file was written, 2 the run cannot be shared, or bad input",
    ),
    Verb(*("scale", "", requests.Scale, "sizing.scale", ""), surfaces=HTTP, slow=True),
    Verb(*("schedule", "", requests.Schedule, "pipeline_schedule.schedule", "schedule_response"), surfaces=HTTP),
    Verb(*("write", "", requests.Write, "exports.write", ""), surfaces=()),
    Verb(
        *("model", "", requests.ModelRequest, "catalogues.find_model", "model_response"),
        surfaces=HTTP,
        path="/models/{name:path}",
    ),
    Verb(*("complete", "", requests.Complete, "completion.complete_names", ""), surfaces=HTTP),
)
VERBS: Mapping[str, Verb] = {verb.name: verb for verb in _TABLE}


def verbs_on(surface: Surface) -> list[Verb]:
    """Return the verbs of a surface, in the order of the table."""
    return [verb for verb in _TABLE if surface in verb.surfaces]
