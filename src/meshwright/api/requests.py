"""The inputs of every verb, declared once; `inputs` says what is derived from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from meshwright.api.inputs import CLI, CLI_MCP, MAX_OVERRIDES, OVERRIDE_BYTES, REMOTE, Input, Request, Text
from meshwright.choices import CHECKED_ONLY, ENGINES, FAIL_ON, FORMATS, FRAMEWORKS, FRONT_ENDS, GOALS, REPORT_FORMATS

if TYPE_CHECKING:
    from meshwright.recipes.types import Recipe as RecipeValue
else:
    RecipeValue = object  # Python callers may pass a recipe itself; surfaces send a name

MAX_PLANS = 100  # a plan has about 6 kB of JSON; a response of this many is still under a megabyte
MAX_ROWS = 500
INSPECTED_SEQ = 8192
CONFIG = "config.json"
NAME_KINDS = ("models", "recipes", "targets", "gpus", "clusters", "goals", "engines", "frameworks")

CONFIG_TEXT = Text(
    name="config",
    help="Contents of the Hugging Face config.json of a model that is not in the catalogue, instead of its name.",
    file=CONFIG,
)
MODEL_TEXT = Text(
    name="config", help=f"Contents of the model's {CONFIG}, if `model` or the file refers to {CONFIG}.", file=CONFIG
)
RECIPE_TEXT = Text(
    name="recipe",
    help="Your own recipe as TOML or JSON text; it may name a base recipe and list only the differences.",
    file="recipe.toml",
    json_file="recipe.json",
    examples=('base = "llama3_8b_sft_config"\n[layout]\ntp = 2\n',),
)
NAMED_RECIPE_TEXT = msgspec.structs.replace(
    RECIPE_TEXT,
    help="Your own recipe, or another framework's config or script, as text in the format that the ending of `name` "
    "gives; TOML or JSON without a name.",
    named_by="name",
)
FILE_TEXT = Text(
    name="text",
    help="Contents of the recipe, config or launch script; nothing in it is run.",
    file="file",
    json_file="file.json",
    named_by="name",
)
Model = Annotated[
    str,
    Input(
        help="Model: a catalogue name, a Hugging Face id, or the path of a config.json.",
        positional=True,
        metavar="MODEL",
        complete="models",
        prompt="Which model? (name, Hugging Face id, or config.json)",
        examples=("llama3-8b", "Qwen/Qwen3-30B-A3B", "deepseek-v3"),
        texts=(CONFIG_TEXT,),
    ),
]
ModelOrRecipe = Annotated[
    str | RecipeValue,
    Input(
        help="Model or recipe: a name or a file; or a config or launch script of another framework.",
        positional=True,
        metavar="MODEL|RECIPE|FILE",
        complete="targets",
        examples=("llama3_70b_pretrain_config", "llama3-8b"),
        texts=(NAMED_RECIPE_TEXT, CONFIG_TEXT),
    ),
]
RecipeOrModel = Annotated[
    str | RecipeValue,
    Input(
        help="Recipe: a name or a file, also another framework's; or a model: a config.json, its folder, or with "
        "--goal a name.",
        positional=True,
        metavar="RECIPE|FILE|MODEL",
        complete="targets",
    ),
]
GPUS = Input(
    help="Cluster: 8xH100, 4x8xH100 (nodes × GPUs), a count; on the command line also auto or a TOML file.",
    metavar="CLUSTER",
    complete="clusters",
    prompt="Which GPUs? (8xH100, 4x8xH100, auto, …)",
    examples=("8xH100", "4x8xH200", "72xGB200"),
)
GOAL = Input(
    help="pretrain, sft (all weights) or peft (adapters); also lora, qlora, dora, fine-tune.",
    metavar="GOAL",
    complete="goals",
    prompt="Which goal? (pretrain, sft, peft, lora, qlora)",
    choices=GOALS,
    synonyms="goal",
)
Gpus = Annotated[str | int, GPUS]
Goal = Annotated[str, GOAL]
ModelGoal = Annotated[
    str,
    Input(
        help="Goal for a model: pretrain, sft or peft; also lora, qlora, dora, fine-tune; a recipe has its own.",
        metavar="GOAL",
        complete="goals",
        choices=GOALS,
        synonyms="goal",
    ),
]
OtherModel = Annotated[
    str,
    Input(
        help="Train this model instead of the recipe's, or if the file names none.",
        metavar="MODEL",
        complete="models",
        surfaces=CLI,
    ),
]
FILE_MODEL = Input(
    help="Model to assume if the file does not name one; for a recipe of ours, another model.",
    metavar="MODEL",
    complete="models",
    examples=("llama3-8b",),
    also=(MODEL_TEXT,),
)
FileModel = Annotated[str, FILE_MODEL]
READ_FRAMEWORKS = (ENGINES[0], *FRAMEWORKS, *CHECKED_ONLY)
FileFramework = Annotated[
    str,
    Input(
        help=f"Framework the file is for, if it cannot be detected: {', '.join(READ_FRAMEWORKS)}.",
        metavar="FRAMEWORK",
        complete="frameworks",
        choices=READ_FRAMEWORKS,
        synonyms="framework",
    ),
]
CheckedFramework = Annotated[
    str,
    Input(
        help=f"Framework the file is for, if it cannot be detected: {', '.join((*READ_FRAMEWORKS, *FRONT_ENDS))}.",
        metavar="FRAMEWORK",
        complete="frameworks",
        choices=(*READ_FRAMEWORKS, *FRONT_ENDS),
        synonyms="framework",
    ),
]
Seq = Annotated[
    int | str,
    Input(
        help="Sequence length, e.g. 8192, 8k or 1M; the recipe's by default.",
        metavar="TOKENS",
        prompt="Which sequence length? (8192, 32k, …; Enter for the recipe's)",
        examples=(8192, "32k"),
    ),
]
Engine = Annotated[
    str,
    Input(
        help=f"Engine that will run the plan: {', '.join(ENGINES)}. It changes memory and speed.",
        metavar="ENGINE",
        complete="engines",
        choices=ENGINES,
        synonyms="engine",
    ),
]
ModelOrFile = Annotated[
    str,
    Input(
        help="Model: a name, a Hugging Face id, or a config.json; or a recipe or another framework's config or script.",
        positional=True,
        metavar="MODEL|FILE",
        complete="models",
        prompt="Which model? (name, Hugging Face id, or config.json)",
        examples=("llama3-8b", "Qwen/Qwen3-30B-A3B", "deepseek-v3"),
        texts=(CONFIG_TEXT, NAMED_RECIPE_TEXT),
    ),
]
NeededGpus = Annotated[str | int, msgspec.structs.replace(GPUS, needed=True)]
NeededGoal = Annotated[str, msgspec.structs.replace(GOAL, needed=True)]
FileEngine = Annotated[
    str,
    Input(
        help=f"Engine that will run the plan: {', '.join(ENGINES)}; a file's own by default, else {ENGINES[0]}.",
        metavar="ENGINE",
        complete="engines",
        choices=ENGINES,
        synonyms="engine",
    ),
]
Overrides = Annotated[
    Sequence[str],
    Input(
        help="Recipe fields as KEY=VALUE, in our keys or another framework's; the rest is sized around them.",
        positional=True,
        metavar="[KEY=VALUE]...",
        examples=(("layout.tp=4", "train.global_batch_size=256"),),
        max_bytes=OVERRIDE_BYTES,
        max_entries=MAX_OVERRIDES,
    ),
]
Calibration = Annotated[
    str, Input(help="Profile of your machine, written by `meshwright calibrate`.", metavar="FILE", surfaces=CLI)
]
Like = Annotated[
    str,
    Input(
        help="Run whose measured speed the estimate follows: its folder, its log, or a CSV of runs.",
        metavar="RUN",
        surfaces=CLI,
    ),
]
Plot = Annotated[
    str, Input(help="Also write a plot to this .svg file, or .png with matplotlib.", metavar="FILE", surfaces=CLI)
]
ToFramework = Annotated[
    str,
    Input(help=f"Framework: {', '.join(FRAMEWORKS)}.", metavar="FRAMEWORK", choices=FRAMEWORKS, synonyms="framework"),
]
FileName = Annotated[
    str,
    Input(
        help="File name of the text; its ending gives the format, and findings repeat it.",
        examples=("train.yaml", "run.sh", "ds_config.json"),
        file_name=True,
        surfaces=REMOTE,
    ),
]
Tokens = Annotated[
    float | str,
    Input(
        help="Token budget, e.g. 15T, 300B or 1e12: adds days and GPU-hours, and cost with a price.",
        metavar="N",
        examples=("15T", "300B"),
    ),
]
Price = Annotated[
    float | str,
    Input(
        help="Price of one GPU for one hour in any currency: 2.50, 2.10EUR or H100=2.50,A100=1.60. Adds the cost.",
        metavar="PER_GPU_HOUR",
        minimum=0,
        maximum=1e6,
        examples=(2.5, "2.10EUR"),
    ),
]
DAYS = Input(help="", metavar="DAYS", minimum=0.01, maximum=1e5, examples=(30.0,), in_days=True)
Days = Annotated[
    float,
    msgspec.structs.replace(
        DAYS, help="Days to train, or 6weeks: how many tokens they take, with the cost at a price."
    ),
]
Deadline = Annotated[
    float,
    msgspec.structs.replace(
        DAYS, help="Deadline: the smallest count that trains --tokens in these days, else the tokens of each count."
    ),
]
Currency = Annotated[str, Input(help="Currency of the price, e.g. EUR.", metavar="CODE", examples=("EUR",))]
MtbfHours = Annotated[
    float,
    Input(
        help="Mean hours between failures of one GPU (default 60,000, fewer in runs above 10,000 GPUs): goodput.",
        metavar="HOURS",
        minimum=0.1,
        maximum=1e9,
        examples=(20000.0,),
    ),
]
DATASET = Input(help="Dataset: a name, file or folder; mock generates random data.", metavar="DATA", surfaces=CLI)
Dataset = Annotated[str, DATASET]
PlannedDataset = Annotated[
    str,
    msgspec.structs.replace(
        DATASET,
        help="Dataset to train on (data.dataset): a name, file or folder; the samples of a file are counted.",
        override="data.dataset",
    ),
]
Epochs = Annotated[
    float | str,
    Input(help="Passes over the dataset: train.epochs=N.", metavar="N", surfaces=CLI, override="train.epochs"),
]
Notes = Annotated[Sequence[str], Input(help="How synonyms among the choices were understood.", surfaces=())]
Benchmark = Annotated[bool, Input(help="Upper-bound throughput on mock data; never a production setting.")]
Limit = Annotated[int, Input(help="Maximum number of rows.", minimum=1, maximum=MAX_ROWS, absent=15, surfaces=("mcp",))]


def path(help: str, metavar: str = "DIR", **more: Any) -> Input:
    """Describe an input of the command line alone: a path, or a value without limits."""
    return Input(help=help, metavar=metavar, surfaces=CLI, **more)


def count(help: str, minimum: float = 1, metavar: str = "N") -> Input:
    """Describe a number on the command line."""
    return Input(help=help, metavar=metavar, minimum=minimum, surfaces=CLI)


def flag(help: str, flag: str = "") -> Input:
    """Describe a boolean option of the command line."""
    return Input(help=help, flag=flag, surfaces=CLI)


class Recommend(Request, frozen=True):
    """Recommend a recipe and layout for MODEL on your GPUs.

    Returns the recipe, its layout, memory and speed, the changes and why they were made, the findings that apply, and
    the command that starts the training. Overrides are kept; the rest is sized around them. A recipe or another
    framework's file keeps its contract, and its GPUs unless others are given.
    """

    model: ModelOrFile
    gpus: NeededGpus | None = None
    goal: NeededGoal | None = None
    seq: Seq | None = None
    engine: FileEngine | None = None
    calibration: Calibration | None = None
    like: Like | None = None
    benchmark: Benchmark = False
    tokens: Tokens | None = None
    price: Price | None = None
    currency: Currency | None = None
    mtbf_hours: MtbfHours | None = None
    explain: Annotated[bool, Input(help="Explain why each number of the layout was chosen.")] = False
    save: Annotated[str | None, path("Write the plan's recipe to this TOML file.", "FILE")] = None
    dry_run: Annotated[bool, flag("Then execute the layout at full size without GPUs (see dryrun).")] = False
    overrides: Overrides = ()
    notes: Notes = ()
    name: FileName | None = None
    framework: FileFramework | None = None
    train_model: Annotated[str | None, msgspec.structs.replace(FILE_MODEL, flag="--model", surfaces=CLI, also=())] = (
        None
    )
    dataset: PlannedDataset | None = None
    days: Days | None = None
    epochs: Epochs | None = None


class Write(Recommend, frozen=True, kw_only=True):
    """Write the recommended recipe as a framework's config."""

    to: Annotated[str, Input(help="Framework, or meshwright.", choices=(ENGINES[0], *FRAMEWORKS), synonyms="framework")]


class Plan(Request, frozen=True):
    """Search all legal layouts and rank those that fit.

    Also lists the layouts that trade memory for speed, and why the others were dropped.
    """

    target: ModelOrRecipe
    gpus: NeededGpus | None = None
    goal: Goal | None = None
    seq: Seq | None = None
    engine: FileEngine | None = None
    calibration: Calibration | None = None
    like: Like | None = None
    top: Annotated[int, Input(help="Number of plans.", metavar="K", minimum=1, maximum=MAX_PLANS)] = 5
    everything: Annotated[
        bool, Input(help="Also list all layouts that fit, with memory and step time.", surfaces=("http",))
    ] = False
    tokens: Tokens | None = None
    price: Price | None = None
    currency: Currency | None = None
    mtbf_hours: MtbfHours | None = None
    overrides: Overrides = ()
    notes: Notes = ()
    name: FileName | None = None
    framework: FileFramework | None = None
    model: FileModel | None = None
    dataset: PlannedDataset | None = None
    days: Days | None = None
    epochs: Epochs | None = None


class Size(Request, frozen=True):
    """Find the GPU counts that fit a training, with days and cost.

    Returns the smallest and the most efficient count, and the speed of each; a token budget adds days and cost, with
    failures included.
    """

    model: Model
    goal: Goal
    gpu: Annotated[
        str,
        Input(
            help="GPU type, or one node of it: H100, 4xL40S, p5.48xlarge; a TOML file; several: H100,A100.",
            metavar="GPU",
            other_flags=("--gpus",),
            complete="gpus",
            examples=("H100", "4xL40S", "GB200"),
            listed=True,
        ),
    ]
    seq: Seq | None = None
    engine: Engine = ENGINES[0]
    calibration: Calibration | None = None
    like: Like | None = None
    tokens: Tokens | None = None
    price: Price | None = None
    currency: Currency | None = None
    mtbf_hours: MtbfHours | None = None
    days: Deadline | None = None
    max_gpus: (
        Annotated[
            int, Input(help="Largest count to try, e.g. what you can get.", metavar="N", minimum=1, examples=(512,))
        ]
        | None
    ) = None
    plot: Plot | None = None
    overrides: Overrides = ()
    notes: Notes = ()
    dataset: PlannedDataset | None = None
    epochs: Epochs | None = None


class Scale(Size, frozen=True):
    """Find the GPU counts that fit a training, for several GPU types."""

    gpu: Annotated[  # type: ignore[assignment]  # several
        Sequence[str], Input(help="GPU types, e.g. H100; repeat it.", examples=(("H100", "H200"),), max_entries=6)
    ]


class Estimate(Request, frozen=True):
    """Estimate memory and step time of exactly this layout.

    Nothing is searched: the layout is the recipe's own with your overrides. Use it to try one change. A config.json of
    your own has no recipe: its layout is the recommended one, with your overrides.
    """

    target: ModelOrRecipe
    gpus: Gpus | None = None
    goal: Goal | None = None
    seq: Seq | None = None
    engine: FileEngine | None = None
    calibration: Calibration | None = None
    like: Like | None = None
    tokens: Tokens | None = None
    price: Price | None = None
    currency: Currency | None = None
    mtbf_hours: MtbfHours | None = None
    plot: Plot | None = None
    overrides: Overrides = ()
    notes: Notes = ()
    name: FileName | None = None
    framework: FileFramework | None = None
    model: FileModel | None = None
    dataset: PlannedDataset | None = None
    days: Days | None = None
    epochs: Epochs | None = None


class Schedule(Estimate, frozen=True):
    """Return start and end of every pass of a pipeline's step."""

    first: Annotated[
        int | None, Input(help="Only the first N micro batches of the step.", minimum=1, maximum=100_000)
    ] = None


class Check(Request, frozen=True):
    """Check a recipe, or another framework's config or script.

    Reads files of Megatron-LM, Megatron-Bridge, AutoModel, torchtitan, KempnerForge, DeepSpeed and Accelerate, programs
    of the Hugging Face Trainer, and files of Axolotl, LLaMA-Factory, TRL and ms-swift; nothing in them is run. Findings
    give the line, and the fix in that framework's keys. A folder or a glob is checked file by file. A comment
    `# meshwright: ignore[rule.name] reason` on a line, or on the line above, accepts a finding.
    """

    target: Annotated[
        str | RecipeValue,
        Input(
            help="Recipe: a name or a file; a model's config.json; another framework's config or script; a folder.",
            positional=True,
            metavar="RECIPE|FILE",
            complete="recipes",
            examples=("llama3_8b_pretrain_config",),
            texts=(FILE_TEXT,),
        ),
    ]
    gpus: Gpus | None = None
    name: FileName | None = None
    engine: Annotated[
        str | None,
        Input(
            help="Engine that will run a recipe of ours.",
            metavar="ENGINE",
            complete="engines",
            choices=ENGINES,
            synonyms="engine",
        ),
    ] = None
    framework: CheckedFramework | None = None
    model: FileModel | None = None
    advice: Annotated[bool, Input(help="Also report non-blocking suggestions for another framework's file.")] = False
    calibration: Calibration | None = None
    overrides: Overrides = ()
    notes: Notes = ()
    goal: ModelGoal | None = None
    dataset: PlannedDataset | None = None
    more: Annotated[
        Sequence[str],
        Input(
            help="More recipes or files, each with a report of its own.",
            positional=True,
            words=True,
            metavar="[FILE]...",
            surfaces=CLI,
        ),
    ] = ()
    format: Annotated[
        str | None,
        Input(
            help="text, json (as --json), sarif (for code scanning) or github (annotations of a workflow).",
            metavar="FORMAT",
            choices=REPORT_FORMATS,
            surfaces=CLI,
        ),
    ] = None
    fail_on: Annotated[
        str,
        Input(
            help="Severity that makes the answer no (exit code 1): error, warning, or never.",
            metavar="SEVERITY",
            choices=FAIL_ON,
        ),
    ] = FAIL_ON[0]
    ignore: Annotated[
        Sequence[str],
        Input(
            help="Accept findings of this rule, e.g. saving.never or 'saving.*'; repeat it.",
            metavar="RULE",
            examples=(("saving.never",),),
            max_entries=MAX_OVERRIDES,
        ),
    ] = ()
    baseline: Annotated[str | None, path("Accept the known findings in this file; only new ones count.", "FILE")] = None
    write_baseline: Annotated[str | None, path("Write all findings to this baseline file.", "FILE")] = None
    skip_unknown: Annotated[bool, flag("Skip named files that no framework reads, as those of a folder.")] = False
    corrected: Annotated[
        bool,
        Input(help="Include the file's text with its repair, or with the fixes of its errors.", surfaces=("http",)),
    ] = False


class Export(Request, frozen=True):
    """Write a recipe or file as another framework's config and command.

    The file may be another framework's too. Fields that the framework has no key for are listed.
    """

    target: Annotated[
        str | RecipeValue,
        Input(
            help="Recipe: a name or a file, also another framework's; or a model: a config.json, its folder, or with "
            "--goal a name.",
            positional=True,
            metavar="RECIPE|FILE",
            complete="recipes",
            examples=("llama3_8b_pretrain_config",),
            texts=(NAMED_RECIPE_TEXT,),
            also=(MODEL_TEXT,),
        ),
    ]
    to: ToFramework
    gpus: Gpus | None = None
    name: FileName | None = None
    out: Annotated[str | None, path("Write the files to this folder instead of printing them.")] = None
    overrides: Overrides = ()
    notes: Notes = ()
    goal: ModelGoal | None = None
    model: OtherModel | None = None
    framework: FileFramework | None = None
    dataset: PlannedDataset | None = None


class Compare(Request, frozen=True):
    """Compare one training on all engines, or recipes, files or runs.

    One target is put on every engine in the layout that is best there: memory, speed, what the engine does not execute,
    what its config loses, and which one to use. Several targets are estimated as they are: fields that differ, memory
    and speed. Several run folders (or metrics.jsonl, or logs) are compared as they ran: settings that differ, losses,
    speed and memory.
    """

    target: ModelOrRecipe
    more: Annotated[
        Sequence[str],
        Input(
            help="More models, recipes, files or run folders, to compare with the first.",
            positional=True,
            words=True,
            metavar="[TARGET]...",
            max_entries=8,
        ),
    ] = ()
    engines: Annotated[
        str | None,
        Input(
            help=f"all, or engines separated by commas: {', '.join(ENGINES)}.",
            metavar="ENGINES",
            examples=("all", "meshwright,torchtitan"),
            listed=True,
        ),
    ] = None
    gpus: Gpus | None = None
    goal: ModelGoal | None = None
    seq: Seq | None = None
    calibration: Calibration | None = None
    overrides: Overrides = ()
    notes: Notes = ()
    name: FileName | None = None
    framework: FileFramework | None = None
    model: FileModel | None = None


class Import(Request, frozen=True):
    """Convert another framework's config or script to a recipe.

    Reads what check reads. Lists the settings that our recipes have no field for, and the values that were assumed
    because the file leaves them open.
    """

    file: Annotated[
        str,
        Input(
            help="Config or launch script of another framework.",
            positional=True,
            metavar="FILE",
            surfaces=CLI,
            texts=(FILE_TEXT,),
        ),
    ]
    gpus: Gpus | None = None
    name: FileName | None = None
    framework: FileFramework | None = None
    model: FileModel | None = None
    goal: ModelGoal | None = None
    out: Annotated[str | None, path("Write the recipe to this .toml, .yaml or .json file.", "FILE")] = None
    format: Annotated[
        str | None, Input(help="toml, yaml, json or python.", metavar="FORMAT", choices=FORMATS, surfaces=CLI)
    ] = None
    overrides: Overrides = ()
    notes: Notes = ()


class Recipes(Request, frozen=True):
    """List the recipes that match a query."""

    query: Annotated[
        str | None,
        Input(
            help="Words that must all match: a model, a goal, GPUs (8xH100), tokens (128k), moe, vision.",
            positional=True,
            metavar="QUERY",
            examples=("qwen3 moe", "llama"),
        ),
    ] = None
    goal: Goal | None = None
    family: Annotated[str | None, Input(help="Model family, e.g. llama.", metavar="FAMILY", examples=("llama",))] = None
    benchmark: Annotated[
        bool | None, Input(help="List the throughput recipes instead of the library.", absent=False)
    ] = None
    limit: Limit | None = None
    notes: Notes = ()


class RecipeRequest(Request, frozen=True):
    """Print one recipe with overrides applied.

    --json prints every field; a format prints those that differ from their default.
    """

    name: Annotated[
        str,
        Input(
            help="Recipe: a name or a file, also another framework's.",
            positional=True,
            metavar="NAME|FILE",
            complete="recipes",
        ),
    ]
    overrides: Overrides = ()
    format: Annotated[str | None, Input(help="toml, yaml, json or python.", metavar="FORMAT", choices=FORMATS)] = None
    gpus: Annotated[
        str | int | None, Input(help="Cluster of the recipe.", metavar="CLUSTER", complete="clusters", surfaces=CLI)
    ] = None
    goal: Annotated[
        str | None,
        Input(
            help="Goal, if the file names none.",
            metavar="GOAL",
            complete="goals",
            choices=GOALS,
            synonyms="goal",
            surfaces=CLI,
        ),
    ] = None
    model: OtherModel | None = None
    framework: FileFramework | None = None


class Models(Request, frozen=True):
    """List models with parameter counts; with --gpus, those that fit.

    Each model's recommended recipe is sized to the GPUs: its memory and speed, largest models first.
    """

    query: Annotated[
        str | None,
        Input(
            help="Part of a name in any spelling, a Hugging Face id, a size (8b), moe or vision; or a config.json.",
            positional=True,
            metavar="QUERY",
            complete="models",
            examples=("qwen3 moe", "Llama 3.1 8B"),
        ),
    ] = None
    gpus: Annotated[
        str | None,
        Input(
            help="List models that fit this cluster.",
            metavar="CLUSTER",
            complete="clusters",
            examples=("1xRTX4090", "8xH100"),
            surfaces=CLI_MCP,
        ),
    ] = None
    goal: Annotated[
        str | None,
        Input(
            help="Goal on these GPUs: pretrain, sft or peft; also lora, qlora, dora, fine-tune.",
            metavar="GOAL",
            complete="goals",
            choices=(*GOALS, "lora", "qlora", "dora"),
            synonyms="goal",
            surfaces=CLI_MCP,
        ),
    ] = None
    seq: Annotated[
        str | int | None,
        Input(help="Sequence length on these GPUs.", metavar="TOKENS", examples=(8192, "32k"), surfaces=CLI_MCP),
    ] = None
    limit: Limit | None = None


class ModelRequest(Request, frozen=True):
    """Return one model's shape and parameter counts."""

    name: Annotated[str, Input(help="Model: a catalogue name or Hugging Face id.", texts=(CONFIG_TEXT,))]


class Inspect(Request, frozen=True):
    """Show a model's layers, parameters, FLOPs and possible splits.

    Parameters are counted by part; FLOPs and cache sizes are those of one token at a sequence length. Also shows how
    far tensor, pipeline, context and expert parallelism can split the model, which engines and frameworks train it, how
    the config was read and what was assumed. A type that no reader knows is built by transformers without weights.
    """

    model: Model
    seq: Annotated[
        int | str | None,
        Input(
            help=f"Sequence length, e.g. 8192, 8k or 1M; {INSPECTED_SEQ:,} by default, or what the model has.",
            metavar="TOKENS",
            examples=(8192, "128k"),
        ),
    ] = None
    plot: Plot | None = None


class GpuCatalogue(Request, frozen=True):
    """List GPUs with memory, peak FLOP/s and link speeds."""

    query: Annotated[
        str | None, Input(help="Part of a name.", positional=True, metavar="QUERY", complete="gpus", examples=("H100",))
    ] = None


class Rules(Request, frozen=True):
    """List rules with symptom, cause and fix."""

    query: Annotated[
        str | None,
        Input(
            help="Part of a rule's id or text, or a framework.",
            positional=True,
            metavar="QUERY",
            examples=("moe", "automodel"),
        ),
    ] = None
    pitfalls: Annotated[bool, Input(help="List only the well-known pitfalls.")] = False
    limit: Limit | None = None


class Explain(Request, frozen=True):
    """Explain an error message, rule, field, finding or term.

    Finds the cause and fix of a framework's error message or traceback; symptom, cause and fix of a rule; the meaning
    of a field, a section (layout) or another framework's key, and the rules about it; a finding of the doctor; a term
    in a report (contract, MFU). A line of findings can be pasted as it is. Free words search all of these.
    """

    about: Annotated[
        str,
        Input(
            help="Error message, rule id, field or section in our keys or another framework's, finding, or free words.",
            positional=True,
            metavar="TEXT",
            examples=("heads.attention", "layout.recompute", "CUDA graph accepts only Tensor inputs"),
            any_text=True,
            max_bytes=1 << 18,
        ),
    ]


class Accuracy(Request, frozen=True):
    """Compare the cost model with a CSV of measurements.

    Reports the error of step time and memory by source and GPU, and how often the model predicts correctly what fits.
    """

    file: Annotated[
        str | None,
        path(
            "CSV of measurements, or a folder of Meshwright runs; the shipped table by default.",
            "FILE",
            positional=True,
        ),
    ] = None
    template: Annotated[bool, flag("Print a table for your own runs, with explanations and examples.")] = False
    points: Annotated[bool, Input(help="Include every measurement with its prediction.", surfaces=("http",))] = False
    plot: Plot | None = None


class Calibrate(Request, frozen=True):
    """Fit a calibration profile to this machine or to your runs.

    Measures this machine's GPU, or fits RUNS, and writes a profile for --calibration. RUNS are run folders, logs in any
    format that `doctor` reads, or CSVs. --recipe, --model and --gpus say what ran where a log does not. Reports the
    error before and after the fit, and the error of every run predicted from the others.
    """

    runs: Annotated[
        Sequence[str],
        path(
            "Run folders, logs, CSVs or rehearsals of your runs; without any, this machine's GPU is measured.",
            "[RUNS]...",
            positional=True,
        ),
    ] = ()
    recipe: Annotated[str | None, path("Recipe or file that ran, if the logs do not name it.", "RECIPE")] = None
    model: Annotated[
        str | None,
        msgspec.structs.replace(
            FILE_MODEL, help="Model that ran, if neither the logs nor --recipe name it.", surfaces=CLI, also=()
        ),
    ] = None
    gpus: Annotated[str | int | None, msgspec.structs.replace(GPUS, surfaces=CLI)] = None
    template: Annotated[bool, flag("Print a table for your own runs, with explanations and examples.")] = False
    out: Annotated[str | None, path("Write the profile to this file instead of printing it.", "FILE")] = None


class Complete(Request, frozen=True):
    """Complete a name."""

    kind: Annotated[str, Input(help="Kind of names.", choices=NAME_KINDS)]
    query: Annotated[str, Input(help="What was typed so far.")] = ""
    limit: Annotated[int, Input(help="Maximum number of names.", minimum=1, maximum=50)] = 12
