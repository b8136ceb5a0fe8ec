"""Find the GPU counts that fit a training: size, also for several GPU types."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import gcd
from shlex import join, quote

import msgspec

from meshwright import clusters, planner
from meshwright.api import requests
from meshwright.api.argument_names import recipe_key
from meshwright.api.dataset_length import epochs_of, sample_width
from meshwright.api.inputs import command_words
from meshwright.api.prices import prices_for
from meshwright.api.questions import REPEATED, question_for
from meshwright.api.resolve import is_recipe, typed_model
from meshwright.api.responses import Part, Response, copied
from meshwright.api.targets import Job, job_for
from meshwright.api.verb_function import verb
from meshwright.errors import InputError
from meshwright.parsing import token_budget
from meshwright.planner import Question, Sizing
from meshwright.recipes.overrides import EPOCHS

BATCH = "train.global_batch_size"
MAX_TYPES = 6  # GPU types of one comparison
UNCOUNTED = "the tokens are what the days train; epochs are counted if --dataset names a file or folder of this machine"


@verb(requests.Size)
def size(request: requests.Size) -> Sizing:
    """Return GPU counts that fit a training, with speed, goodput, and days and cost for a token budget."""
    _require_model(request)
    types = (
        list(dict.fromkeys(text.strip() for text in request.gpu.split(","))) if "," in request.gpu else [request.gpu]
    )
    if len(types) > MAX_TYPES or not all(types):
        raise InputError(
            f"must be 1 to {MAX_TYPES} GPU types", field="gpu", value=request.gpu, fix=("--gpu H100,A100",)
        )
    tokens = token_budget(request.tokens)
    questions = [_sized_question(msgspec.structs.replace(request, gpu=one)) for one in types]
    prices, unpriced = prices_for(request, questions)
    counted = () if tokens is not None else _epoch_tokens(questions[0], request)
    if counted:
        tokens = counted[0]
    asked = tokens is not None or request.days is not None
    is_open = tokens is None and EPOCHS in map(recipe_key, request.overrides)  # samples that cannot be counted here
    text = (
        "the tokens are what the days train: the samples of the epochs are counted if --dataset names a file or folder"
    )
    uncounted = (text,) if is_open else ()
    if request.price is not None and not asked:
        price = f"--price {quote(str(request.price))}"
        fix: tuple[str, ...] = (f"--tokens 1T {price}", f"--days 30 {price}")
        reason = "needs a token budget or a number of days"
        if EPOCHS in map(recipe_key, request.overrides):  # of the recipe's dataset, whose samples are not counted
            reason += "; epochs are one if --dataset names a file or folder of this machine"
            fix = (f"--dataset FILE {price}", *fix)
        raise InputError(reason, field="price", value=request.price, fix=fix)
    found = [
        planner.size(question, request.overrides, tokens, price if asked else None, request.max_gpus, request.days, own)
        for question, price, own in zip(questions, prices, _own_counts(types, questions), strict=True)
    ]
    sizing = found[0] if len(found) == 1 else planner.compare(found)
    return msgspec.structs.replace(sizing, notes=(*sizing.notes, *unpriced, *counted[1:], *uncounted))


def _own_counts(types: Sequence[str], questions: Sequence[Question]) -> list[int | None]:
    """Return the count of every named cluster, if one of several has several nodes: 8xB200 next to 32xH100."""
    if len(types) == 1 or all(question.cluster.nodes == 1 for question in questions):
        return [None] * len(types)
    return [
        None if clusters.is_known(text) else question.cluster.world
        for text, question in zip(types, questions, strict=True)
    ]


def _epoch_tokens(question: Question, request: requests.Size) -> tuple[float, str] | tuple[()]:
    """Return the tokens of the requested epochs over a local dataset, and a note; nothing without epochs."""
    if EPOCHS not in map(recipe_key, request.overrides):  # no recipe of ours has epochs of its own
        return ()
    recipe = planner.baseline_for(question, request.overrides).requested
    epochs = epochs_of(recipe, question.engine)
    if epochs is None:
        return ()
    width = sample_width(recipe, question.engine) or recipe.data.seq_length
    return epochs.samples * width, f"the tokens of {epochs.source}"


def _sized_question(request: requests.Size) -> Question:
    """Return the question on one node: that of a GPU type, a count (the GPUs of one node), or a file's."""
    named = clusters.is_known(request.gpu)
    try:
        on = clusters.usual_node(request.gpu) if named else request.gpu
        question = question_for(request, typed_model(request.model), request.goal, on)
    except InputError as error:
        if error.field != "gpus":
            raise
        if request.gpu.endswith(".toml"):  # the file is wrong, not the choice of the GPU
            raise InputError(error.reason, field="gpu", value=request.gpu, fix=error.fix) from None
        plain = [fix.split("x", 1)[-1] if fix[:1].isdigit() else fix for fix in error.fix]
        known = [fix for fix in plain if clusters.is_known(fix)] or ["H100", "4xL40S"]
        raise InputError(
            error.reason, field="gpu", value=request.gpu, fix=tuple(f"--gpu {fix}" for fix in known)
        ) from None
    if named:
        return _with_usual_node(question)
    if any(one.field == "nodes" for one in question.assumed):  # 16xH100: a count of GPUs, not a node
        cluster, board = question.cluster, question.cluster.gpu.nvlink_board
        if cluster.gpus_per_node == 1 and board:  # 4xGH200: superchips whose nodes are boards of several
            node = cluster.world if cluster.world <= board else gcd(cluster.world, board)
            shape = f"{cluster.world // node}x{node}x{cluster.gpu.name}"
            question = question_for(request, question.model_ref, request.goal, shape)
            if node == cluster.world:
                return question
        node = question.cluster.gpus_per_node
        given = "is one of the counts" if question.cluster.nodes > 1 else "gives only the node"
        text = f"nodes of {node} GPUs; the number of GPUs is the result, {request.gpu} {given}"
        assumed = tuple(one for one in question.assumed if one.field != "nodes")
        question = msgspec.structs.replace(question, assumed=(*assumed, clusters.Assumption("nodes", str(node), text)))
    return question


def _require_model(request: requests.Size) -> None:
    """Raise for a recipe or a file, with the command that sizes its model with its batch and samples."""
    if not is_recipe(request.model):
        return
    job = _job_of(request)
    recipe = None if job is None else job.recipe
    engine = request.engine if job is None else job.engine
    is_batch = BATCH in map(recipe_key, request.overrides)
    batch = () if recipe is None or is_batch else (f"{BATCH}={recipe.train.global_batch_size}",)
    given = {
        **{name: getattr(request, name) for name in (*REPEATED, "gpu", "max_gpus")},
        "model": "MODEL" if recipe is None else recipe.model,
        "goal": request.goal if recipe is None else recipe.goal,
        "seq": request.seq or (None if recipe is None else recipe.data.seq_length),
        "engine": engine,
        "overrides": [*request.overrides, *batch],
    }
    reason = "is a recipe or a config, and size takes a model: it chooses the GPUs and the layout itself"
    command = join(["meshwright", "size", *command_words(requests.Size, given)])
    raise InputError(reason, field="model", value=request.model, fix=(command,))


def _job_of(request: requests.Size) -> Job | None:
    """Return what a recipe or a file trains, on nodes of the first GPU type if it names none; None if it is open."""
    first = request.gpu.partition(",")[0].strip()
    for gpus in (None, str(clusters.usual_node(first)) if clusters.is_known(first) else first):
        with suppress(InputError):
            return job_for(request.model, gpus=gpus)
    return None


def _with_usual_node(question: Question) -> Question:
    """Return the question with the GPU's usual node as an assumption."""
    gpu = question.cluster.gpu
    if gpu.gpus_per_node == 1 and not gpu.nvlink_board:
        return question
    other = gpu.nvlink_board or (4 if gpu.gpus_per_node != 4 else 8)
    hint = f"write --gpu {other}x{gpu.name} for nodes of {other}"
    text = f"nodes of {gpu.gpus_per_node} GPU{'s' * (gpu.gpus_per_node > 1)}, the usual {gpu.name} node; {hint}"
    usual = clusters.Assumption("nodes", str(gpu.gpus_per_node), text)
    return msgspec.structs.replace(question, assumed=(*question.assumed, usual))


class SizesResponse(Response, frozen=True, kw_only=True):
    """GPU counts with speed, goodput, days and cost."""

    smallest: planner.Size | None
    most_efficient: planner.Size | None
    sizes: Sequence[planner.Size]
    gpu: str
    node: int
    tried: Sequence[int]
    no_layout: Sequence[int]
    tokens: float | None
    price: float | None
    currency: str
    notes: Sequence[str]
    assumed: Sequence[clusters.Assumption]
    storage: planner.Storage | None
    own: int | None
    compared: Sequence[planner.Compared]
    deadline_days: float | None = None
    in_time: planner.Size | None = None
    reliability: planner.Reliability | None = None

    @property
    def ok(self) -> bool:
        """Return whether a count fits, of any type, and is in time if there is a deadline."""
        if self.deadline_days is not None and self.tokens is not None:
            return self.in_time is not None or any(one.in_time is not None for one in self.compared)
        return self.smallest is not None


class Series(Part, frozen=True, kw_only=True):
    """The sizes of one GPU type."""

    gpu: str
    smallest: planner.Size | None
    most_efficient: planner.Size | None
    sizes: Sequence[planner.Size]


class ScaleResponse(Response, frozen=True, kw_only=True):
    """The sizes of several GPU types."""

    series: Sequence[Series]


def sizes_response(sizing: Sizing, request: requests.Size | None = None) -> SizesResponse:
    """Return the response of size."""
    return copied(SizesResponse, sizing)


@verb(requests.Scale)
def scale(request: requests.Scale) -> ScaleResponse:
    """Return the sizes of several GPU types."""
    values = msgspec.structs.asdict(request)
    sizings = {gpu: size(**values | {"gpu": gpu}) for gpu in request.gpu}
    return ScaleResponse(series=[copied(Series, one, gpu=gpu) for gpu, one in sizings.items()])
