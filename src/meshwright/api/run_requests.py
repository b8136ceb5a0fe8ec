"""The inputs of verbs that run something: training, dry runs, jobs, diagnosis, and work on checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_args

import msgspec

from meshwright.api.inputs import CLI, Input, Request, Text
from meshwright.api.requests import (
    FILE_MODEL,
    Calibration,
    Dataset,
    Epochs,
    FileFramework,
    Goal,
    Gpus,
    ModelGoal,
    Notes,
    OtherModel,
    Overrides,
    Plot,
    RecipeOrModel,
    count,
    flag,
    path,
)
from meshwright.choices import ENGINES, FRAMEWORKS, SCHEDULERS
from meshwright.engine.run_spec import Nproc, RunOptions, TrainOptions
from meshwright.recipes.types import Documents

INTERNAL = ()  # set by code, never by a user

LOG_TEXT = Text(
    name="log", help="Output of the run; for a long log, its beginning and its last steps.", file="train.log"
)
BASELINE_TEXT = Text(name="baseline", help="Log of the same training on fewer GPUs.", file="baseline.log")


ModelThatRan = Annotated[
    str, msgspec.structs.replace(FILE_MODEL, help="Model that ran, if neither the log nor --recipe names it.", also=())
]


class Bench(RunOptions, Request, frozen=True):
    """Measure throughput: 50 steps on mock data, next to the estimate.

    Never a production setting.
    """

    recipe: RecipeOrModel
    model: OtherModel | None = None
    overrides: Overrides = ()
    goal: ModelGoal | None = None
    framework: FileFramework | None = None


class Train(TrainOptions, Request, frozen=True):
    """Train a recipe on our engine, on one or more ranks.

    Runs alone, on N ranks of this machine, or as a rank of torchrun or SLURM. If the run folder contains checkpoints,
    training resumes from the latest one, on any number of ranks and in any layout. On Ctrl-C, SIGTERM, SIGUSR1 or
    SIGHUP the run saves a checkpoint, prints the command that resumes it and exits; the third Ctrl-C does not save.
    """

    recipe: RecipeOrModel
    dataset: Dataset | None = None
    model: OtherModel | None = None
    overrides: Overrides = ()
    goal: ModelGoal | None = None
    framework: FileFramework | None = None
    epochs: Epochs | None = None
    loss: Annotated[
        Callable[..., Any] | None,
        Input(help="Function of logits and labels that returns the loss of every token.", surfaces=INTERNAL),
    ] = None
    tp_plan: Annotated[
        Mapping[str, str] | None,
        Input(help="How linear layers of your own modules are sharded: colwise or rowwise by path.", surfaces=INTERNAL),
    ] = None
    model_class: Annotated[
        type | None,
        Input(help="Class to build in place of transformers' class for the model's config.", surfaces=INTERNAL),
    ] = None


class DryRun(Request, frozen=True):
    """Execute a recipe's step at full size without GPUs.

    The engine's code runs on fake tensors for every distinct rank of the cluster (by default the recipe's): forward,
    backward, gradients, optimizer. The result is the memory of the worst rank by allocation site, the FLOPs, every
    collective, and the difference from the estimate. No files are written.
    """

    recipe: RecipeOrModel
    gpus: Gpus | None = None
    goal: ModelGoal | None = None
    model: OtherModel | None = None
    framework: FileFramework | None = None
    exact: Annotated[bool, flag("Trace every layer and micro batch instead of replaying equal ones.")] = False
    processes: Annotated[int | None, count("Ranks traced in parallel; one per core by default.")] = None
    plot: Plot | None = None
    overrides: Overrides = ()
    progress: Annotated[
        Callable[[str], None] | None, Input(help="Called with a line per stage.", surfaces=INTERNAL)
    ] = None


class Rehearse(Request, frozen=True):
    """Time a cluster's step on one GPU: real kernels, simulated network.

    Runs the engine's step of every kind of rank at full world size on this machine's GPU. Kernels are timed and memory
    is allocated; each collective moves no data and takes the time that the communication model has for the cluster, on
    its own stream. The result is the step time by part with its band, MFU, peak memory, and what limits the step.
    """

    recipe: RecipeOrModel
    gpus: Gpus | None = None
    goal: ModelGoal | None = None
    model: OtherModel | None = None
    framework: FileFramework | None = None
    as_gpu: Annotated[
        str | None,
        Input(
            help="GPU type to scale kernel times to.  [default: that of --gpus]",
            flag="--as",
            metavar="GPU",
            complete="gpus",
            surfaces=CLI,
        ),
    ] = None
    alternatives: Annotated[bool, flag("Also rehearse the two best other layouts.")] = False
    network: Annotated[str | None, path("JSON file of measured collectives, in place of the model.", "FILE")] = None
    trace: Annotated[str | None, path("Write a timeline for Perfetto to this JSON file.", "FILE")] = None
    out: Annotated[str | None, path("Write the result to this JSON file, which calibrate reads.", "FILE")] = None
    layers: Annotated[int | None, count("Most layers to run per stage; others are added from equal ones.")] = None
    seconds: Annotated[float | None, count("Seconds of timed steps.  [default: 100]", 1, "S")] = None
    device: Annotated[
        str,
        Input(help="cuda or cpu; a CPU tries small models.", metavar="DEVICE", choices=("cuda", "cpu"), surfaces=CLI),
    ] = "cuda"
    tiny: Annotated[bool, flag("Rehearse a laptop-size model of the same structure.")] = False
    plot: Plot | None = None
    overrides: Overrides = ()
    progress: Annotated[
        Callable[[str], None] | None, Input(help="Called with a line per stage.", surfaces=INTERNAL)
    ] = None


class Launch(Request, frozen=True):
    """Write a recipe as a job for a scheduler; submit and watch it.

    The rules check it on its cluster first; a job that cannot start or does not fit is not written. A SLURM job that
    is preempted or reaches its time limit saves a checkpoint, is requeued and resumes.
    """

    recipe: RecipeOrModel
    scheduler: Annotated[
        str, Input(help=f"{', '.join(SCHEDULERS)}.", metavar="NAME", choices=SCHEDULERS, synonyms="scheduler")
    ]
    gpus: Gpus | None = None
    to: Annotated[
        str | None,
        Input(
            help=f"Framework to run it with: {', '.join((ENGINES[0], *FRAMEWORKS))}.  "
            "[default: that of the file, else meshwright]",
            metavar="FRAMEWORK",
            choices=(ENGINES[0], *FRAMEWORKS),
            synonyms="framework",
        ),
    ] = None
    goal: ModelGoal | None = None
    framework: FileFramework | None = None
    framework_dir: Annotated[
        str | None, path("Checkout of the framework of --to on the nodes: its scripts and modules are run from there.")
    ] = None
    save_minutes: Annotated[
        float | None,
        Input(
            help="Minutes between checkpoints of --to, as steps at the estimated speed.  [default: 30 if requeued]",
            metavar="N",
            above=0,
            surfaces=CLI,
        ),
    ] = None
    dataset: Dataset | None = None
    model: OtherModel | None = None
    tiny: Annotated[bool, flag("Train a laptop-size model of the same structure on CPU, as a trial.")] = False
    out: Annotated[str | None, path("Run folder to resume from; runs/NAME if the job may be restarted.")] = None
    name: Annotated[
        str | None, path("Job name; the recipe's name by default.", "NAME", other_flags=("--job-name", "-J"))
    ] = None
    cpu: Annotated[bool, flag("Request no GPU, for --tiny runs. Ranks are counted like GPUs.")] = False
    cpus_per_rank: Annotated[int | None, path("CPU cores per rank.  [default: 8, with --cpu 1]", "N")] = None
    python: Annotated[str | None, path("Interpreter of the job.  [default: with --submit this one]", "PATH")] = None
    env: Annotated[Sequence[str], path("Environment variable of the job; repeat it.", "NAME=VALUE", any_text=True)] = ()
    setup: Annotated[
        Sequence[str], path("Shell line before the run, e.g. 'module load cuda'.", "LINE", any_text=True)
    ] = ()
    image: Annotated[str | None, path("Container image.", "IMAGE")] = None
    mounts: Annotated[
        Sequence[str],
        path(
            "Mount in the container, besides the folders SLURM jobs need; for Kubernetes SOURCE is a volume claim.",
            "SOURCE:/PATH",
            flag="--mount",
        ),
    ] = ()
    hosts: Annotated[str | None, path("The nodes, for --scheduler hosts.", "A,B,…")] = None
    head: Annotated[str | None, path("Rendezvous node, for --scheduler torchrun.", "HOST")] = None
    port: Annotated[int | None, path("Rendezvous port.  [default: 29500; SLURM: by job]", "PORT")] = None
    max_restarts: Annotated[int | None, path("Restarts of failed ranks.", "N")] = None
    kind: Annotated[str | None, path("Kubernetes: pytorchjob or jobset.", "KIND")] = None
    namespace: Annotated[str | None, path("Kubernetes namespace.", "NAME")] = None
    time: Annotated[
        str | None, path("Time limit in SLURM's format: 90, 12:00:00, 2-00:00:00.", "LIMIT", other_flags=("-t",))
    ] = None
    partition: Annotated[
        str | None, path("SLURM partition, or several separated by commas.", "NAME", other_flags=("-p",))
    ] = None
    account: Annotated[str | None, path("SLURM account.", "NAME", other_flags=("-A",))] = None
    qos: Annotated[str | None, path("SLURM quality of service.", "NAME", other_flags=("-q",))] = None
    reservation: Annotated[str | None, path("SLURM reservation.", "NAME")] = None
    constraint: Annotated[str | None, path("SLURM node features, e.g. 'h100&ib'.", "FEATURES", other_flags=("-C",))] = (
        None
    )
    sbatch: Annotated[Sequence[str], path("Another sbatch option, e.g. mem=0; repeat it.", "KEY[=VALUE]")] = ()
    logs: Annotated[str | None, path("Folder of the log NAME-ID.out; the folder of submission by default.")] = None
    requeue: Annotated[bool, flag("Do not requeue the job after preemption.", flag="--no-requeue")] = True
    max_requeues: Annotated[int | None, path("Maximum number of requeues.  [default: 100]", "N")] = None
    signal_ahead_s: Annotated[
        int | None,
        path(
            "Seconds before the time limit at which SLURM signals the run to save.  [default: checkpoint.grace_s + 60]",
            "SECONDS",
            flag="--signal-ahead",
        ),
    ] = None
    container_kind: Annotated[
        str | None,
        path("How SLURM starts --image: pyxis or apptainer.  [default: apptainer for .sif files, else pyxis]", "KIND"),
    ] = None
    write: Annotated[str | None, path("Write the files to this folder.")] = None
    overwrite: Annotated[bool, flag("Replace existing files whose contents differ.")] = False
    accept_changes: Annotated[
        bool, flag("Resume even though contract fields differ from the run's checkpoint, as train does.")
    ] = False
    submit: Annotated[bool, flag("Submit the job to SLURM.")] = False
    watch: Annotated[bool, flag("Follow the submitted job to its end: states and log.")] = False
    overrides: Overrides = ()
    notes: Notes = ()


class Doctor(Request, frozen=True):
    """Diagnose a run from its folder or log, cheapest fix first.

    Reads our run folders and logs of Megatron-LM, Megatron-Bridge, torchtitan, NeMo AutoModel, KempnerForge and the
    Hugging Face Trainer; the log format is detected. Looks for: low MFU, out of memory, slow data, a slow network,
    pipeline bubbles, uneven steps and ranks, growing memory, a loss that is NaN, diverges, spikes or plateaus,
    overfitting, slow checkpoints, restarts. Every finding comes with its figures, and every change with its estimated
    effect. Overrides describe the run where the log does not.
    """

    run: Annotated[
        str,
        Input(
            help="Run folder, log file, or - for standard input.",
            positional=True,
            metavar="RUN",
            surfaces=CLI,
            texts=(LOG_TEXT,),
        ),
    ]
    recipe: Annotated[
        str | None,
        Input(
            help="Recipe or model that ran, if the log does not name it.",
            metavar="RECIPE",
            complete="targets",
            examples=("llama3_8b_pretrain_config",),
        ),
    ] = None
    model: ModelThatRan | None = None
    gpus: Gpus | None = None
    goal: Goal | None = None
    baseline: Annotated[
        str | None,
        Input(
            help="Run of the same training on fewer GPUs, as the reference for network speed.",
            metavar="RUN",
            surfaces=CLI,
            texts=(BASELINE_TEXT,),
        ),
    ] = None
    calibration: Calibration | None = None
    overrides: Overrides = ()
    notes: Notes = ()
    curves: Annotated[
        bool, Input(help="Include loss, step time, gradient norm and memory by step.", surfaces=("http",))
    ] = False


class Share(Request, frozen=True):
    """Write a run's measurement as a file for a pull request.

    One row of the project's tables of measurements: hardware, framework and version, model, layout, tokens/s with its
    spread, memory, date and command. Paths, host names and user names are left out; nothing is sent anywhere. Runs that
    are too short, have a NaN or trained a tiny model are refused.
    """

    run: Annotated[
        str, Input(help="Run folder or log file, as for doctor.", positional=True, metavar="RUN", surfaces=CLI)
    ]
    recipe: Annotated[
        str | None,
        Input(help="Recipe or file that ran, if the log does not name it.", metavar="RECIPE", complete="targets"),
    ] = None
    model: ModelThatRan | None = None
    gpus: Gpus | None = None
    goal: Goal | None = None
    framework_version: Annotated[
        str | None, path("Version of what trained, if the log does not state it.", "VERSION")
    ] = None
    by: Annotated[str | None, path("Name to credit in the row.  [default: none]", "NAME")] = None
    out: Annotated[str | None, path("File to write.  [default: measurement-MODEL-GPUS-ID.csv]", "FILE")] = None
    overrides: Overrides = ()


class Samples(Request, frozen=True):
    """Show fine-tuning samples with their loss mask.

    Renders the first conversations with the recipe's chat template and tokenizer, marks the tokens that are in the
    loss, and counts what is truncated, dropped and packed. Nothing is trained.
    """

    recipe: RecipeOrModel
    dataset: Dataset | None = None
    count: Annotated[int, count("Number of conversations to show.")] = 2
    model: OtherModel | None = None
    overrides: Overrides = ()
    goal: ModelGoal | None = None
    framework: FileFramework | None = None


class Tokenize(Request, frozen=True):
    """Tokenize text, JSONL, CSV or Parquet files for training."""

    inputs: Annotated[
        Sequence[str],
        Input(help="Text, JSONL, CSV or Parquet files.", positional=True, metavar="FILE...", surfaces=CLI),
    ]
    tokenizer: Annotated[str, path("Tokenizer folder, a cached id, or bytes.")]
    out: Annotated[str, path("Folder for the shards.")]
    column: Annotated[str, path("Text column of JSONL, CSV or Parquet files.", "NAME")] = "text"
    workers: Annotated[int | None, count("Number of processes; one per core by default.")] = None
    shard_tokens: Annotated[int | None, count("Tokens per shard.")] = None
    skip_bad_lines: Annotated[bool, flag("Skip and count unreadable lines.")] = False
    format: Annotated[
        str,
        Input(
            help="Our shards, or Megatron's .bin/.idx.", metavar="FORMAT", choices=("shards", "megatron"), surfaces=CLI
        ),
    ] = "shards"
    documents: Annotated[
        str,
        Input(
            help="Where documents of a .txt file end: separator (form feed or a line <|endoftext|>), blank_line, line, "
            "file; auto: separator if there is one, else blank_line.",
            metavar="END",
            choices=get_args(Documents),
            surfaces=CLI,
        ),
    ] = "auto"


Source = Annotated[
    str,
    Input(
        help="Run folder, one of its checkpoints, a Hugging Face folder, PEFT adapters, or a Megatron checkpoint.",
        positional=True,
        metavar="SOURCE",
        surfaces=CLI,
    ),
]


Which = Annotated[
    str,
    Input(help="Checkpoint of a run: best (lowest validation loss), latest, or a step.", metavar="WHICH", surfaces=CLI),
]


class Generate(Request, frozen=True):
    """Generate text from PROMPT with a trained model."""

    source: Source
    prompt: Annotated[
        str | list[dict[str, Any]],
        Input(
            help='Prompt, or a JSON list of messages: [{"role": "user", "content": "Hi"}].',
            positional=True,
            metavar="PROMPT",
            objects=True,
            any_text=True,
            max_bytes=1 << 20,
            surfaces=CLI,
        ),
    ]
    max_tokens: Annotated[int, count("Maximum number of new tokens.")] = 64
    temperature: Annotated[float, count("Sampling temperature; 0 takes the most likely token.", 0, "T")] = 0.0
    top_p: Annotated[
        float, Input(help="Probability mass to sample from.", metavar="P", above=0, maximum=1, surfaces=CLI)
    ] = 1.0
    seed: Annotated[int, Input(help="Random seed.", metavar="N", surfaces=CLI)] = 0
    checkpoint: Which | None = None
    chat: Annotated[bool | None, flag("Send the prompt as a user turn, or as plain text.", flag="--chat/--raw")] = None
    system: Annotated[
        str | None,
        Input(help="System message before the prompt.", metavar="TEXT", any_text=True, max_bytes=1 << 20, surfaces=CLI),
    ] = None


class Evaluate(Request, frozen=True):
    """Measure the perplexity of a trained model on a dataset.

    Each sample counts once, and every token equally, on any number of ranks.
    """

    source: Source
    dataset: Annotated[str | None, path("Dataset; the run's held-out samples by default.", "DATA")] = None
    base: Annotated[bool, flag("Evaluate the model that the run started from, on the same samples.")] = False
    answers: Annotated[bool, flag("Count only the answers of conversations, for a model folder.")] = False
    samples: Annotated[int | None, count("Number of samples; all by default, at most 4096.")] = None
    checkpoint: Which | None = None
    nproc: Nproc | None = None
    overrides: Overrides = ()


class Convert(Request, frozen=True):
    """Convert SOURCE to a Hugging Face folder.

    Also reads Megatron-LM checkpoints of Llama, Qwen and Mixtral models (torch_dist and legacy, any tp, pp and ep).
    For a run with adapters, writes the adapters in PEFT's format, or with --merge the merged model.
    """

    source: Source
    out: Annotated[str, path("Folder to write.", "OUT", positional=True)]
    dtype: Annotated[
        str | None,
        Input(
            help="bf16, fp16 or fp32; the source's by default.",
            metavar="DTYPE",
            choices=("bf16", "fp16", "fp32"),
            synonyms="dtype",
            surfaces=CLI,
        ),
    ] = None
    shard_gib: Annotated[float, Input(help="Size of a weight file.", metavar="GIB", above=0, surfaces=CLI)] = 5.0
    consolidated: Annotated[bool, flag("Write one file.")] = False
    merge: Annotated[bool, flag("Merge adapters into the model.")] = False
    checkpoint: Which | None = None
    model: Annotated[
        str | None,
        Input(
            help="Model of a Megatron checkpoint: name, or folder with config.json and tokenizer.",
            metavar="MODEL",
            complete="models",
            surfaces=CLI,
        ),
    ] = None
