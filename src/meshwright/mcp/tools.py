"""The tools: what each is asked, which verb answers, and what it says."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright import api, file_access
from meshwright.errors import InputError
from meshwright.mcp import rendering
from meshwright.mcp.fields import LONG, Field, read, schema_of, words_of

Arguments = dict[str, Any]
Answer = dict[str, Any]

CONFIG, BASELINE = "config.json", "baseline.log"
SECONDS = 30.0  # that one call may take
MOST_PLANS = 20
MOST_ROWS = 500
LOG = 512 * 1024  # bytes of a log
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,99}")

INSTRUCTIONS = (
    "Facts about training large models: recipes, layouts, memory, speed, cost, and what is wrong with a config or a "
    "run. Begin with recommend; try one change with estimate; send configs and launch scripts to check, and logs of "
    "runs to doctor, as text; look up a finding with explain. Answers are estimates with their band; nothing is run "
    "and no file is opened or written."
)


@dataclass(frozen=True)
class Tool:
    """One tool: its inputs, the verb behind it, and its answer in a few lines."""

    name: str
    title: str
    text: str
    fields: tuple[Field, ...]
    ask: Callable[[Arguments], Answer]
    tell: Callable[[Answer], str]
    keys: Mapping[str, str]  # what its answer always has, and of which JSON type
    examples: tuple[Mapping[str, Any], ...]

    def input_schema(self) -> Answer:
        """The JSON schema of its inputs."""
        return schema_of(self.fields) | {"examples": [dict(example) for example in self.examples]}

    def output_schema(self) -> Answer:
        """The JSON schema of its answer, the top of it."""
        properties = {"schema": {"const": api.SCHEMA}, **{name: {"type": kind} for name, kind in self.keys.items()}}
        return {"type": "object", "properties": properties, "required": list(properties)}

    def answer(self, arguments: Mapping[str, Any]) -> Answer:
        """The answer to a call; no name in it reaches a file."""
        asked = read(self.fields, arguments)
        with file_access.only(_texts(asked)):
            return self.ask(asked)


def _texts(asked: Arguments) -> dict[str, str]:
    """The texts that came with a question, by the names that stand for them."""
    named = {
        CONFIG: asked.get("config"),
        _recipe_name(asked): asked.get("recipe"),
        _file_name(asked): asked.get("text", asked.get("log")),
        BASELINE: asked.get("baseline"),
    }
    return {name: text for name, text in named.items() if text is not None}


def _recipe_name(asked: Arguments) -> str:
    return "recipe.json" if str(asked.get("recipe")).lstrip().startswith("{") else "recipe.toml"


def _file_name(asked: Mapping[str, Any]) -> str:
    name, text = asked.get("name"), str(asked.get("text"))
    if name is None and asked.get("log") is not None:
        return "train.log"
    if name is None:
        return "file.json" if text.lstrip().startswith("{") else "file"
    if not _FILE_NAME.fullmatch(name) or name in (CONFIG, BASELINE):
        raise InputError("is a plain file name, without a folder", field="name", value=name, fix=("name: train.yaml",))
    return str(name)


def _one_of(asked: Arguments, example: str, **names: str) -> str:
    """The thing that is asked about: by its name, or by the one text that was sent for it."""
    given = [name for name in names if asked[name] is not None]
    if len(given) == 2 and given[-1] == "config" and given[0] == "recipe":
        given = ["recipe"]  # the config is the model that the recipe names
    if len(given) != 1:
        which = " or ".join(names)
        reason = f"give one of {which}" if given else f"say {which}"
        raise InputError(reason, field=next(iter(names)), fix=(f"only {given[0]}" if given else example,))
    return names[given[0]] or str(asked[given[0]])


def _recommend(asked: Arguments) -> Answer:
    target = _one_of(asked, 'model: "llama3-8b"', model="", config=CONFIG)
    shared = {name: asked[name] for name in ("seq", "engine", "benchmark", "overrides")}
    plan = api.recommend(target, asked["gpus"], asked["goal"], **shared)
    return api.plan_to_dict(plan, explain=asked["explain"])


def _plan(asked: Arguments) -> Answer:
    target = _one_of(asked, 'target: "llama3_8b_sft_config"', target="", recipe=_recipe_name(asked), config=CONFIG)
    shared = {name: asked[name] for name in ("seq", "engine", "top", "overrides")}
    return api.ranking_to_dict(api.plan(target, asked["gpus"], asked["goal"], **shared))


def _estimate(asked: Arguments) -> Answer:
    target = _one_of(asked, 'target: "llama3_8b_sft_config"', target="", recipe=_recipe_name(asked), config=CONFIG)
    shared = {name: asked[name] for name in ("gpus", "goal", "seq", "engine", "overrides")}
    return api.estimate_to_dict(api.estimate(target, **shared))


def _size(asked: Arguments) -> Answer:
    target = _one_of(asked, 'model: "llama3-8b"', model="", config=CONFIG)
    shared = {name: asked[name] for name in ("seq", "engine", "tokens", "price", "overrides")}
    return api.sizing_to_dict(api.size(target, asked["goal"], asked["gpu"], **shared))


def _check(asked: Arguments) -> Answer:
    target = _one_of(asked, "text: what the file says", target="", text=_file_name(asked))
    shared = {name: asked[name] for name in ("gpus", "engine", "framework", "model", "advice", "overrides")}
    return api.check_to_dict(api.check(target, **shared))


def _export(asked: Arguments) -> Answer:
    target = _one_of(asked, 'target: "llama3_8b_sft_config"', target="", recipe=_recipe_name(asked))
    return api.export_to_dict(*api.export(target, asked["to"], gpus=asked["gpus"], overrides=asked["overrides"]))


def _recipes(asked: Arguments) -> Answer:
    found = api.find_recipes(asked["query"], goal=asked["goal"], family=asked["family"], benchmark=asked["benchmark"])
    return _first("recipes", api.entries_to_dicts(found), asked["limit"])


def _rules(asked: Arguments) -> Answer:
    found = api.rule_catalogue(asked["query"], pitfalls=asked["pitfalls"])
    return _first("rules", [api.rule_to_dict(rule) for rule in found], asked["limit"])


def _explain(asked: Arguments) -> Answer:
    return api.explained_to_dict(api.explain(asked["about"]))


def _doctor(asked: Arguments) -> Answer:
    found = api.diagnose(
        _file_name(asked),
        recipe=asked["target"],
        gpus=asked["gpus"],
        goal=asked["goal"],
        baseline=None if asked["baseline"] is None else BASELINE,
        overrides=asked["overrides"],
    )
    return api.checkup_to_dict(found)


def _first(name: str, rows: list[Answer], limit: int) -> Answer:
    """The first rows of a catalogue; how many more there are is said."""
    left = {"left_out": len(rows) - limit} if len(rows) > limit else {}
    return {"schema": api.SCHEMA, name: rows[:limit], **left}


MODEL = Field(
    "model",
    "text",
    "The model: a catalogue name in any usual spelling or a Hugging Face id. Leave it out when you send config.",
    examples=("llama3-8b", "Qwen/Qwen3-30B-A3B", "deepseek-v3"),
    option="",
)
CONFIG_TEXT = Field(
    "config",
    "text",
    "For a model that the catalogue does not know: the text of its Hugging Face config.json, instead of a name.",
    longest=LONG,
)
TARGET = Field(
    "target",
    "text",
    "A recipe's name (see the tool recipes) or a model's name. Leave it out when you send recipe or config.",
    examples=("llama3_70b_pretrain_config", "llama3-8b"),
    option="",
)
SHIPPED = Field(
    "target",
    "text",
    "A shipped recipe's name (see the tool recipes). Leave it out when you send a text.",
    examples=("llama3_8b_pretrain_config",),
    option="",
)
RECIPE_TEXT = Field(
    "recipe",
    "text",
    "A recipe of your own, as TOML or JSON text; it may name a base recipe and say only what differs.",
    examples=('base = "llama3_8b_sft_config"\n[layout]\ntp = 2\n',),
    longest=LONG,
)
GPUS = Field(
    "gpus",
    "text or whole number",
    "The cluster: 8xH100, 4x8xH100 (nodes × GPUs), 72xGB200, or a count of H100.",
    examples=("8xH100", "4x8xH200", "72xGB200"),
    option="--gpus",
)
GPUS_NEEDED = Field(GPUS.name, GPUS.kind, GPUS.text, needed=True, examples=GPUS.examples, option=GPUS.option)
GOAL = Field("goal", "text", "What is trained; a recipe knows its own.", choices=api.GOALS, option="--goal")
GOAL_NEEDED = Field("goal", "text", "What is trained.", needed=True, choices=api.GOALS, option="--goal")
SEQ = Field(
    "seq",
    "text or whole number",
    "Tokens in a sequence; the recipe's own by default.",
    examples=(8192, "32k"),
    option="--seq",
)
ENGINE = Field(
    "engine",
    "text",
    "What will run it; it changes memory and speed.",
    default=api.ENGINES[0],
    choices=api.ENGINES,
    option="--engine",
)
OVERRIDES = Field(
    "overrides",
    "words",
    "Recipe fields as key=value, in our spelling or another framework's; they are kept and the rest sized around them.",
    examples=(["layout.tp=4", "train.global_batch_size=256"],),
    longest=500,
    option="",
)


def _flag(name: str, text: str) -> Field:
    return Field(name, "true or false", text, default=False, option=f"--{name}")


def _limit(rows: int) -> Field:
    return Field("limit", "whole number", "At most so many rows.", default=rows, least=1, most=MOST_ROWS)


PLAN_KEYS = {
    **dict.fromkeys(("question", "recipe", "contract", "layout", "estimate", "commands", "no_command"), "object"),
    **dict.fromkeys(("changes", "findings"), "array"),
}

OUT_OF_MEMORY = """\
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of \
79.11 GiB of which 2.10 GiB is free. Of the allocated memory 74.20 GiB is allocated by PyTorch, and 1.05 GiB is \
reserved by PyTorch but unallocated.
"""

TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "recommend",
            "Recommend a training recipe",
            "The main question: which recipe for this model on these GPUs, with which layout, does it fit, how fast, "
            "what will bite, and the command that starts it. Begin here.",
            (
                *(MODEL, CONFIG_TEXT, GPUS_NEEDED, GOAL_NEEDED, SEQ, ENGINE),
                _flag("benchmark", "Upper-bound throughput on mock data; never a production setting."),
                _flag("explain", "Say why each number of the layout was chosen."),
                OVERRIDES,
            ),
            _recommend,
            rendering.plan,
            {**PLAN_KEYS, "suggestions": "array"},
            ({"model": "llama3-8b", "gpus": "8xH100", "goal": "sft"},),
        ),
        Tool(
            "plan",
            "Search all layouts",
            "Searches every legal layout: the fastest that fit, what trades memory for speed, why others were dropped.",
            (
                *(TARGET, RECIPE_TEXT, CONFIG_TEXT, GPUS_NEEDED, GOAL, SEQ, ENGINE),
                Field("top", "whole number", "How many plans.", default=3, least=1, most=MOST_PLANS, option="--top"),
                OVERRIDES,
            ),
            _plan,
            rendering.ranking,
            {"plans": "array", "pareto": "array", "dropped": "array", "searched": "integer"},
            ({"target": "llama3-8b", "gpus": "16xA100-40", "goal": "pretrain", "top": 2},),
        ),
        Tool(
            "estimate",
            "Estimate one exact layout",
            "Memory and step time by part of exactly this layout: the recipe's own with overrides, nothing searched. "
            "Use it to try one change.",
            (TARGET, RECIPE_TEXT, CONFIG_TEXT, GPUS, GOAL, SEQ, ENGINE, OVERRIDES),
            _estimate,
            rendering.plan,
            {**PLAN_KEYS, "memory_by_stage_gib": "object"},
            ({"target": "llama3_8b_pretrain_config", "gpus": "8xH100", "overrides": ["layout.recompute=full"]},),
        ),
        Tool(
            "size",
            "How many GPUs",
            "GPU counts that fit a training: the smallest, the most efficient, speed of each; days and cost for a "
            "token budget, with failures counted in.",
            (
                *(MODEL, CONFIG_TEXT, GOAL_NEEDED),
                Field("gpu", "text", "The GPU type.", needed=True, examples=("H100", "GB200"), option="--gpu"),
                *(SEQ, ENGINE),
                Field(
                    "tokens",
                    "text or number",
                    "Token budget; adds days, and cost with price.",
                    examples=("15T", "300B"),
                    option="--tokens",
                ),
                Field(
                    *("price", "number", "Price of one GPU for one hour."),
                    examples=(2.5,),
                    least=0,
                    most=1e6,
                    option="--price",
                ),
                OVERRIDES,
            ),
            _size,
            rendering.sizing,
            {"sizes": "array"},
            (
                {
                    "model": "llama3-8b",
                    "goal": "pretrain",
                    "gpu": "H100",
                    "tokens": "1T",
                    "price": 2.5,
                    "overrides": ["layout.pp=1"],
                },
            ),
        ),
        Tool(
            "check",
            "Check a config or a recipe",
            "What is wrong with a config or launch script of Megatron-LM, Megatron-Bridge, AutoModel, torchtitan, "
            "KempnerForge, DeepSpeed or Accelerate, or with a recipe, before it queues: findings with line and fix. "
            "Send the text; nothing in it is run.",
            (
                Field("text", "text", "The text of the config or launch script.", longest=LONG),
                Field(
                    "name",
                    "text",
                    "Its file name; the ending tells the format, and findings repeat it.",
                    examples=("train.yaml", "run.sh", "ds_config.json"),
                ),
                SHIPPED,
                Field(
                    "framework",
                    "text",
                    "Whose words it is written in, when the text does not show it.",
                    choices=("meshwright", *api.FRAMEWORKS),
                    option="--framework",
                ),
                GPUS,
                Field("engine", "text", "What will run a recipe of ours.", choices=api.ENGINES, option="--engine"),
                Field(
                    "model",
                    "text",
                    "What a text trains that does not say it.",
                    examples=("llama3-8b",),
                    option="--model",
                ),
                Field("config", "text", f"The model's {CONFIG}, where model or the text says {CONFIG}.", longest=LONG),
                _flag("advice", "Of another framework's text, also say what could be better."),
                OVERRIDES,
            ),
            _check,
            rendering.check,
            {"framework": "string", "ok": "boolean", "findings": "array", "unresolved": "array", "notes": "array"},
            (
                {
                    "text": '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, "fp16": {"enabled": true}, '
                    '"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}',
                    "name": "ds_config.json",
                    "model": "llama3-8b",
                    "gpus": "8xH100",
                },
                {"target": "llama3_70b_pretrain_config", "gpus": "16xA100-80"},
            ),
        ),
        Tool(
            "export",
            "Write another framework's config",
            "A recipe as config files and command of another framework. Texts are returned, nothing is written; what "
            "that framework cannot say is listed.",
            (
                *(SHIPPED, RECIPE_TEXT, CONFIG_TEXT),
                Field("to", "text", "The framework.", needed=True, choices=api.FRAMEWORKS, option="--to"),
                *(GPUS, OVERRIDES),
            ),
            _export,
            rendering.export,
            {"framework": "string", "ok": "boolean", "files": "object", "command": "string", "unmapped": "array"},
            ({"target": "llama3_8b_pretrain_config", "to": "torchtitan", "gpus": "8xH100"},),
        ),
        Tool(
            "doctor",
            "Diagnose a run",
            "What is wrong with a run, from its log (ours, Megatron's, torchtitan's or AutoModel's), and what to try, "
            "cheapest first: low MFU, out of memory, slow data or network, bubbles, a loss that diverges or spikes.",
            (
                Field(
                    "log",
                    "text",
                    "The text that the run printed; of a long one the beginning and the last steps.",
                    needed=True,
                    longest=LOG,
                ),
                Field(
                    "target",
                    "text",
                    "The recipe or model that ran, where the log does not say.",
                    examples=("llama3_8b_pretrain_config",),
                    option="--recipe",
                ),
                *(GPUS, GOAL),
                Field("baseline", "text", "The log of the same training on fewer GPUs.", longest=LOG),
                OVERRIDES,
            ),
            _doctor,
            rendering.checkup,
            {"ok": "boolean", "kind": "string", "figures": "array", "findings": "array", "notes": "array"},
            ({"log": OUT_OF_MEMORY, "target": "llama3_8b_pretrain_config", "gpus": "8xH100"},),
        ),
        Tool(
            "recipes",
            "Find recipes",
            "The index of tested recipes, by words: a model, a goal, GPUs (8xH100), tokens (128k), moe, vision.",
            (
                Field("query", "text", "Words; all of them must match.", examples=("qwen3 moe", "llama"), option=""),
                GOAL,
                Field("family", "text", "One family of models.", examples=("llama",), option="--family"),
                _flag("benchmark", "The throughput recipes instead of the library."),
                _limit(40),
            ),
            _recipes,
            rendering.recipes,
            {"recipes": "array"},
            ({"query": "llama3 8b", "goal": "sft"},),
        ),
        Tool(
            "rules",
            "Find rules",
            "Symptom and cause of everything that is checked, by part of a rule's id or by a framework's name.",
            (
                Field("query", "text", "Part of an id, or a framework.", examples=("moe", "automodel"), option=""),
                _flag("pitfalls", "Only the well-known pitfalls."),
                _limit(40),
            ),
            _rules,
            rendering.rules,
            {"rules": "array"},
            ({"query": "heads"},),
        ),
        Tool(
            "explain",
            "Explain a rule, field or finding",
            "Symptom, cause and fix of one rule; what a recipe field means and what is checked about it; what a "
            "finding of the doctor means.",
            (
                Field(
                    "about",
                    "text",
                    "A rule's id, a recipe field in our spelling or another framework's, or a finding's text.",
                    needed=True,
                    examples=("heads.attention", "layout.recompute", "tensor_model_parallel_size"),
                    longest=4000,
                    option="",
                ),
            ),
            _explain,
            rendering.explained,
            {"about": "string", "kind": "string", "rules": "array"},
            ({"about": "heads.attention"}, {"about": "layout.recompute"}, {"about": "speed.low-mfu"}),
        ),
    )
}


def words(tool: Tool, arguments: Mapping[str, Any]) -> list[str]:
    """The words of the command that asks the same, where the text that was sent is a file."""
    name, *rest = words_of(tool.name, tool.fields, arguments)
    sent = [_file_name(arguments)] if {"text", "log"} & set(arguments) else []
    return [name, *sent, *rest]


def described() -> Answer:
    """All tools with their schemas, as one JSON object."""
    return {
        "schema": api.SCHEMA,
        "tools": [
            {
                "name": tool.name,
                "title": tool.title,
                "description": tool.text,
                "input": tool.input_schema(),
                "output": tool.output_schema(),
            }
            for tool in TOOLS.values()
        ],
    }
