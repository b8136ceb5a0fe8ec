"""Plan a training: recommend, plan, size, estimate, and the schedule of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, gcd
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from meshwright import clusters, costs, file_access, launch, models, planner
from meshwright.api import requests
from meshwright.api.argument_names import recipe_key
from meshwright.api.dataset_length import dataset_notes, epochs_of, grouped_width, with_own_data
from meshwright.api.inputs import verb
from meshwright.api.resolve import assumed_in, is_recipe, model_and_goal, referenced_model, require_known, typed_model
from meshwright.api.responses import (
    Estimate,
    FieldKind,
    Finding,
    MemoryGib,
    Part,
    Response,
    copied,
    estimate_part,
    finding_parts,
)
from meshwright.api.targets import GOAL_FIX, Job, job_for, own_recipe, stated_goal, stated_gpus
from meshwright.costs.timeline import ScheduledPass
from meshwright.errors import InputError
from meshwright.frameworks import ImportedFile
from meshwright.notes import note
from meshwright.parsing import price_per_hour, prices_by_gpu, sequence_length, token_budget
from meshwright.planner import Plan, Question, Ranking, Sizing
from meshwright.recipes.overrides import EPOCHS
from meshwright.recipes.types import ENGINES, Recipe

Asked = requests.Recommend | requests.Plan | requests.Estimate
"""Requests about a model, a recipe or a file."""

MAX_TYPES = 6  # GPU types of one comparison


@verb(requests.Recommend)
def recommend(request: requests.Recommend) -> Plan:
    """Return the plan for a model on a cluster: recipe, layout, memory, speed and findings."""
    job = named_job(request, request.model, request.train_model)
    if job is None:
        for name, value in (("gpus", request.gpus), ("goal", request.goal)):
            if value is None:
                fix = ("--gpus 8xH100",) if name == "gpus" else GOAL_FIX
                raise InputError("required for a model", field=name, fix=fix)
        question = _question(request, typed_model(request.model), *_given(request), request.benchmark)
    else:
        question = job_question(request, job)
    _price(request, question), token_budget(request.tokens)  # refused before the search
    found = _of_this_length(question, None if job is None else job.on(question.engine), request)
    if request.save:
        from meshwright.api.catalogues import save_recipe  # 10 ms that other recommendations save

        save_recipe(found, request.save)
    return _with_budget(with_own_data(found), request)


def _of_this_length(question: Question, recipe: Recipe | None, request: requests.Recommend) -> Plan:
    """Return the plan, of as many steps as the requested tokens or days take; steps and epochs of the user stay."""
    tokens, overrides = token_budget(request.tokens), request.overrides
    if tokens is None and request.days is None:
        return planner.recommend(question, overrides, recipe)
    baseline = planner.baseline_for(question, overrides, recipe)
    if baseline.requested.train.epochs or "train.steps" in baseline.reasons:
        return planner.recommend(question, overrides, recipe)
    if tokens is None:
        plan = planner.recommend(question, overrides, recipe, lambda plan: _steps_of_days(plan, request))
        return _explained(plan, f"what {request.days:g} days train")
    per_step = planner.step_tokens(baseline.case, grouped_width(baseline.requested))
    steps = _steps_of_tokens(tokens, per_step, baseline.requested)
    plan = planner.recommend(question, overrides if steps is None else (*overrides, f"train.steps={steps}"), recipe)
    return _explained(plan, f"{request.tokens} tokens of {per_step:,} per step")


def _steps_of_tokens(tokens: float, per_step: int, recipe: Recipe) -> int | None:
    """Return the steps of so many tokens; None for the recipe's, which stay if the tokens are less than a step."""
    steps = ceil(tokens / per_step)
    return None if tokens < per_step or steps == recipe.train.steps else steps


def _steps_of_days(plan: Plan, request: requests.Recommend) -> int | None:
    """Return the steps that a plan trains in the requested days; None for the recipe's, which stay if it cannot."""
    found = _budget(plan, request)
    steps = found.steps if isinstance(found, planner.Budget) else 0
    return None if steps in (0, plan.recipe.train.steps) else steps


def _explained(plan: Plan, text: str) -> Plan:
    """Return the plan with why its steps changed."""
    why = f"requested: {text}; a new experiment"
    changes = (msgspec.structs.replace(c, why=why) if c.field == "train.steps" else c for c in plan.changes)
    return msgspec.structs.replace(plan, changes=tuple(changes))


def _notes(plan: Plan) -> tuple[str, ...]:
    """Return a plan's notes, and how many samples a dataset of the user's own has."""
    own_data = any(change.field == "data.dataset" for change in plan.changes)
    return (*plan.notes, *(dataset_notes(plan.recipe) if own_data else ()))


def _given(request: requests.Recommend) -> tuple[str, str | int]:
    return str(request.goal), request.gpus if request.gpus is not None else ""


@verb(requests.Plan)
def plan(request: requests.Plan) -> Ranking:
    """Return the fastest plans of all legal layouts for a model or recipe, and why others were dropped."""
    job = named_job(request, request.target, request.model)
    if job is None:
        model, goal = model_and_goal(str(request.target), request.goal)
        if request.gpus is None:
            raise InputError("required to plan a model without a recipe", field="gpus", fix=("--gpus 8xH100",))
        question, recipe = _question(request, model, goal or stated_goal(model), request.gpus), None
    else:
        question = job_question(request, job)
        recipe = job.on(question.engine)
    _price(request, question), token_budget(request.tokens)  # refused before the search
    return planner.rank_layouts(question, request.overrides, request.top, request.everything, recipe)


@verb(requests.Size)
def size(request: requests.Size) -> Sizing:
    """Return GPU counts that fit a training, with speed, goodput, and days and cost for a token budget."""
    types = (
        list(dict.fromkeys(text.strip() for text in request.gpu.split(","))) if "," in request.gpu else [request.gpu]
    )
    if len(types) > MAX_TYPES or not all(types):
        raise InputError(
            f"must be 1 to {MAX_TYPES} GPU types", field="gpu", value=request.gpu, fix=("--gpu H100,A100",)
        )
    tokens = token_budget(request.tokens)
    questions = [_sized_question(msgspec.structs.replace(request, gpu=one)) for one in types]
    prices, unpriced = _prices(request, questions)
    counted = () if tokens is not None or request.days is not None else _epoch_tokens(questions[0], request)
    if counted:
        tokens = counted[0]
    asked = tokens is not None or request.days is not None
    if request.price is not None and not asked:
        fix = (f"--tokens 1T --price {request.price}", f"--days 30 --price {request.price}")
        raise InputError("needs a token budget or a number of days", field="price", value=request.price, fix=fix)
    found = [
        planner.size(question, request.overrides, tokens, price if asked else None, request.max_gpus, request.days)
        for question, price in zip(questions, prices, strict=True)
    ]
    sizing = found[0] if len(found) == 1 else planner.compare(found)
    return msgspec.structs.replace(sizing, notes=(*sizing.notes, *unpriced, *counted[1:]))


def _epoch_tokens(question: Question, request: requests.Size) -> tuple[float, str] | tuple[()]:
    """Return the tokens of the requested epochs over a local dataset, and a note; nothing without epochs."""
    if EPOCHS not in map(recipe_key, request.overrides):  # no recipe of ours has epochs of its own
        return ()
    recipe = planner.baseline_for(question, request.overrides).requested
    epochs = epochs_of(recipe)
    if epochs is None:
        return ()
    width = grouped_width(recipe) or recipe.data.seq_length
    return epochs.samples * width, f"the tokens of {epochs.source}"


def _prices(request: requests.Size, questions: Sequence[Question]) -> tuple[list[planner.Price | None], list[str]]:
    """Return the price of every type, None without one, and a note for those; raise if a price is for none of them."""
    names, named = [one.cluster.gpu.name for one in questions], _prices_by_type(request.price)
    missing = [name for name in names if named and name not in named]
    if len(missing) == len(names):
        raise _no_price(request.price, missing)
    found = [
        _price(msgspec.structs.replace(request, price=None) if name in missing else request, one)
        for name, one in zip(names, questions, strict=True)
    ]
    unpriced = [name for name, price in zip(names, found, strict=True) if price is None and name in missing]
    return found, [f"--price has none for {', '.join(unpriced)}: without cost"] if unpriced else []


def _sized_question(request: requests.Size) -> Question:
    """Return the question on one node: that of a GPU type, a count (the GPUs of one node), or a file's."""
    named = clusters.is_known(request.gpu)
    try:
        on = f"{clusters.gpu(request.gpu).gpus_per_node}x{request.gpu}" if named else request.gpu
        question = _question(request, typed_model(request.model), request.goal, on)
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
            question = _question(request, question.model_ref, request.goal, shape)
            if node == cluster.world:
                return question
        node = question.cluster.gpus_per_node
        text = f"nodes of {node} GPUs; the number of GPUs is the result, so {request.gpu} gives only the node"
        assumed = tuple(one for one in question.assumed if one.field != "nodes")
        question = msgspec.structs.replace(question, assumed=(*assumed, clusters.Assumption("nodes", str(node), text)))
    return question


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


def _price(request: Asked | requests.Size, question: Question) -> planner.Price | None:
    """Return the requested price, or that of the cluster file."""
    on = question.cluster
    given = price_per_hour(
        _price_of(request.price, on.gpu.name), request.currency if request.price is not None else None
    )
    if given is None and on.price is not None:
        given = price_per_hour(on.price, request.currency or on.currency or None)
    if given is None and request.currency is not None:
        price_per_hour(None, request.currency)
    return None if given is None else planner.Price(*given)


def _price_of(price: float | str | None, gpu: str) -> float | str | None:
    """Return the price of a GPU type: the only one, or that of its own among H100=2.5,A100=1.6."""
    by_type = _prices_by_type(price)
    if not by_type:
        return price
    if gpu not in by_type:
        raise _no_price(price, [gpu])
    return by_type[gpu]


def _prices_by_type(price: float | str | None) -> dict[str, str]:
    """Return the prices of H100=2.5,A100=1.6 by the name of the GPU type; empty for one price."""
    named = prices_by_gpu(price)
    try:
        return {clusters.gpu(name).name: amount for name, amount in named.items()} if named else {}
    except InputError as error:
        fixes = tuple(f"--price {str(price).replace(str(error.value), fix)}" for fix in error.fix)
        raise InputError(error.reason, field="price", value=price, fix=fixes) from None


def _no_price(price: float | str | None, gpus: Sequence[str]) -> InputError:
    fix = f"--price {','.join(f'{name}=PRICE' for name in gpus)}"
    return InputError(f"has no price for {', '.join(gpus)}", field="price", value=price, fix=(fix, "without --price"))


def _with_budget(plan: Plan, request: Asked) -> Plan:
    """Return the plan with the days and cost that were requested, for Python."""
    found = _budget(plan, request)
    return msgspec.structs.replace(plan, budget=found) if isinstance(found, planner.Budget) else plan


def _budget(plan: Plan, request: Asked | None) -> planner.Budget | UnsetType | None:
    """Return days and cost of the requested tokens or days, else of the recipe's epochs, or of its steps at a price."""
    if request is None:
        return UNSET
    asked = request.tokens is not None or request.days is not None
    epochs = None if asked else epochs_of(plan.recipe)
    if not asked and request.price is None and not plan.recipe.train.epochs:
        return UNSET
    if not plan.exists or not plan.estimate.fits:
        return None
    price = _price(request, plan.question)
    width = grouped_width(plan.recipe)
    return planner.budget(plan.case, plan.estimate, token_budget(request.tokens), price, epochs, width, request.days)


@verb(requests.Estimate)
def estimate(request: requests.Estimate) -> Plan:
    """Return the estimate of exactly this layout: the recipe's own with overrides, nothing searched."""
    job = named_job(request, request.target, request.model)
    if job is not None:
        question = job_question(request, job)
        _price(request, question), token_budget(request.tokens)
        if job.imported is not None and question.engine == job.engine:
            return _plan_of_file(request, question, job.imported)
        named = request.target if isinstance(request.target, str) else None
        found = planner.plan_fixed(question, job.on(question.engine), request.overrides, named)
        return _with_budget(with_own_data(found), request)
    question = model_question(request)
    if models.is_path(question.model_ref):  # it has no recipe whose layout could be estimated: as dryrun and check do
        return _with_budget(_estimated_as_recommended(question, request), request)
    return _with_budget(with_own_data(planner.plan_fixed(question, None, request.overrides)), request)


def _estimated_as_recommended(question: Question, request: requests.Estimate) -> Plan:
    """Return the estimate of the layout that is recommended for a user's model with these overrides."""
    sized = planner.recommend(question, request.overrides)
    found = planner.plan_fixed(question, own_recipe(sized), request.overrides)
    if sized.exists:
        what = "the layout is the recommended one with your overrides"
    else:
        what = f"no layout can have your overrides; this one is that of {sized.base.name} with them"
    note(f"{request.target}: {what}; layout.KEY=VALUE sets another")
    if found.repair is not None and sized.repair is not None:  # typed, it gives another recommended layout
        found = msgspec.structs.replace(found, repair=sized.repair)
    return with_own_data(found)


def model_question(request: requests.Estimate) -> Question:
    """Return the question about a model: a user's own has a default goal and default GPUs."""
    target, gpus = str(request.target), request.gpus
    require_known(target)
    model = typed_model(target)
    if gpus is None and not models.is_path(model.strip()):
        raise InputError("required to estimate a model without a recipe", field="gpus", fix=("--gpus 8xH100",))
    goal = request.goal or stated_goal(model)
    return _question(request, model, goal, gpus or stated_gpus(model, goal))


def named_job(request: Asked, target: str | Recipe, model: str | None) -> Job | None:
    """Return the recipe or file that a request names; None for a model."""
    if isinstance(target, str) and not is_recipe(target):
        for field, value in (("framework", request.framework), ("model", model)):
            if value is not None:
                reason = "applies to recipes and files, and the target is neither"
                raise InputError(reason, field=field, value=value, fix=(f"remove --{field}",))
        return None
    overrides = [*request.overrides, *_seq_override(request)]
    options = {"framework": request.framework, "model": model}
    return job_for(target, request.goal, request.gpus, overrides, request.engine, **options)


def _seq_override(request: Asked) -> tuple[str, ...]:
    length = sequence_length(request.seq)
    return () if length is None else (f"data.seq_length={length}",)


def job_question(request: Asked, job: Job) -> Question:
    """Return the question about a recipe or file: on its own cluster and engine unless others are requested."""
    question = _question(request, job.recipe.model, job.recipe.goal, request.gpus or job.recipe.cluster, job=job)
    typed = question.assumed if request.gpus is not None else ()  # the recipe's own cluster was not typed
    return msgspec.structs.replace(question, assumed=(*typed, *job.assumed(question.engine)))


def _plan_of_file(request: requests.Estimate, question: Question, imported: ImportedFile) -> Plan:
    """Return the estimate of another framework's file as that framework runs it, with the findings of check."""
    case = planner.case_of(imported.checked.recipe, imported.model, imported.cluster, question.engine)
    if question.calibration is not None:
        case = case.replace(calibration=question.calibration)
    return Plan(
        question=question,
        base=imported.recipe,
        recipe=imported.recipe,
        match="exact",
        case=case,
        estimate=costs.estimate(case),
        changes=(),
        findings=imported.checked.findings,
        repair=imported.checked.repair,
    )


@verb(requests.Schedule)
def schedule(request: requests.Schedule) -> costs.Timeline:
    """Return start and end of every pass of a pipeline's step, or of its first micro batches."""
    line = timeline(estimate.handle(request))
    if request.first is None:
        return line
    return msgspec.structs.replace(line, passes=tuple(p for p in line.passes if p.micro_batch < request.first))


def timeline(plan: Plan) -> costs.Timeline:
    """Return which micro batch every rank of a plan's pipeline works on, over one step."""
    if not plan.exists:
        raise InputError("cannot be built: see the findings", field="layout", value=plan.recipe.layout.pp_schedule)
    return costs.timeline(plan.case)


def _question(
    request: requests.Recommend | requests.Plan | requests.Size | requests.Estimate,
    model: str,
    goal: str,
    gpus: str | int,
    benchmark: bool = False,
    job: Job | None = None,
) -> Question:
    """Return a request as the values that the planner works with."""
    spec, reference = referenced_model(model) if job is None else (job.model, job.recipe.model)
    return Question(
        model=spec,
        model_ref=reference,
        cluster=clusters.cluster(str(gpus)),
        cluster_ref=str(file_access.resolved(str(gpus))) if str(gpus).endswith(".toml") else "",
        goal=goal,  # type: ignore[arg-type]  # one of its choices, as validated
        seq_length=sequence_length(request.seq),
        engine=request.engine or (ENGINES[0] if job is None else job.engine),  # type: ignore[arg-type]  # as validated
        recipe_words=() if job is None else job.words,
        benchmark=benchmark,
        calibration=load_calibration(request.calibration),
        assumed=assumed_in(gpus),
    )


def load_calibration(path: str | None) -> Any:
    """Return the shipped calibration with the user's profile; None without one."""
    if path is None:
        return None
    from meshwright.costs import calibrate

    return calibrate.load(path)


class QuestionPart(Part, frozen=True, kw_only=True):
    """What was requested."""

    model: str
    gpus: str
    goal: str
    seq_length: int
    engine: str
    assumed: Sequence[clusters.Assumption] = ()


class BaseRecipe(Part, frozen=True, kw_only=True):
    """The shipped recipe that a plan starts from."""

    name: str
    match: str | UnsetType = UNSET
    goal: str
    benchmark: bool
    made_for: str
    approach: str | UnsetType = UNSET


class PeftPart(Part, frozen=True, kw_only=True):
    """The adapter of a fine-tuning."""

    method: str
    rank: int
    alpha: float


class Contract(Part, frozen=True, kw_only=True):
    """The fields that determine the trained weights."""

    seq_length: int
    global_batch_size: int
    precision: str
    optimizer: str
    lr: float
    min_lr: float
    schedule: str
    warmup_steps: int
    steps: int | None  # None for a run by epochs
    epochs: float | None
    dataset: str
    packing: bool
    peft: PeftPart | None


class PlanLayout(Part, frozen=True, kw_only=True):
    """How the training is distributed over the GPUs."""

    strategy: str
    tp: int
    pp: int
    vp: int
    cp: int
    ep: int
    etp: int
    dp_shard: int
    dp_replicate: int
    sp: bool
    micro_batch_size: int
    gradient_accumulation: int
    recompute: str
    pp_schedule: str
    stage_layers: Sequence[int]
    cp_comm: str
    offload: str


class ChangePart(Part, frozen=True, kw_only=True):
    """A field that differs from the base recipe."""

    field: str
    old: Any = msgspec.field(name="from")
    new: Any = msgspec.field(name="to")
    kind: FieldKind
    why: str


class PlanResponse(Response, frozen=True, kw_only=True):
    """One plan."""

    question: QuestionPart
    recipe: BaseRecipe
    contract: Contract
    layout: PlanLayout
    estimate: Estimate
    changes: Sequence[ChangePart]
    findings: Sequence[Finding]
    suggestions: Sequence[planner.Suggestion] | UnsetType = UNSET
    options: Sequence[planner.Option] | UnsetType = UNSET
    repair: planner.Repair | UnsetType = UNSET
    contradiction: planner.Contradiction | UnsetType = UNSET
    published: planner.PublishedLayout | UnsetType = UNSET
    commands: Mapping[str, str]
    no_command: Mapping[str, str]
    budget: planner.Budget | UnsetType | None = UNSET
    smallest_that_fits: int | UnsetType | None = UNSET
    smallest_cluster: str | UnsetType | None = UNSET
    smallest_without_offload: str | UnsetType | None = UNSET
    reasons: Sequence[planner.Reason] | UnsetType = UNSET
    memory_by_stage_gib: Mapping[str, MemoryGib] | UnsetType = UNSET
    dry_run: Mapping[str, Any] | UnsetType | None = UNSET
    notes: Sequence[str] | UnsetType = UNSET

    @property
    def ok(self) -> bool:
        """Return whether it can start and fits."""
        fits = self.estimate.fits and not any(f.severity == "error" for f in self.findings)
        return fits and (self.dry_run is UNSET or bool(self.dry_run and self.dry_run["fits"]))


class LayoutScore(Part, frozen=True, kw_only=True):
    """A layout with its memory and step time."""

    layout: Mapping[str, Any]
    step_s: float
    total_gib: float


class PlansResponse(Response, frozen=True, kw_only=True):
    """Ranked plans, layouts that trade memory for speed, and what was dropped."""

    plans: Sequence[PlanResponse]
    pareto: Sequence[LayoutScore]
    dropped: Sequence[planner.Dropped]
    searched: int
    findings: Sequence[Finding] | UnsetType = UNSET
    repair: planner.Repair | UnsetType = UNSET
    contradiction: planner.Contradiction | UnsetType = UNSET
    fitting: Sequence[LayoutScore] | UnsetType = UNSET
    notes: Sequence[str] | UnsetType = UNSET

    @property
    def ok(self) -> bool:
        """Return whether a plan can start and fits."""
        return any(one.ok for one in self.plans)


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


class ScheduleResponse(Response, frozen=True, kw_only=True):
    """The passes of a pipeline's step over time."""

    schedule: str
    ranks: int
    chunks: int
    micro_batches: int
    followed: int
    span_s: float
    idle_share: float
    passes: Sequence[ScheduledPass]


def plan_response(plan: Plan, request: requests.Recommend | requests.Plan | None = None) -> PlanResponse:
    """Return the response of recommend, with reasons if they were requested."""
    response = _plan_response(plan)
    more: dict[str, Any] = {"budget": _budget(plan, request)}
    if not plan.estimate.fits or _offloads_to_fit(plan) or any(f.rule == "memory.host" for f in plan.findings):
        fitting, plain = planner.smallest_fit(plan, () if request is None else request.overrides)
        if fitting is None and any(f.severity == "error" and f.rule.split(".")[0] != "memory" for f in plan.findings):
            return msgspec.structs.replace(response, **more)  # not the number of GPUs is wrong, see the findings
        more["smallest_that_fits"] = None if fitting is None else fitting.world
        more["smallest_cluster"] = None if fitting is None else str(fitting)
        more["smallest_without_offload"] = None if plain is None else str(plain)
    if isinstance(request, requests.Recommend) and request.explain:
        more["reasons"] = planner.reasons(plan)
        more["memory_by_stage_gib"] = _memory_by_stage(plan)
    return msgspec.structs.replace(response, **more)


def _offloads_to_fit(plan: Plan) -> bool:
    """Return whether the plan uses host memory because nothing else fits, not because the user or the recipe does."""
    return bool(plan.options) and any(change.field == "layout.offload" for change in plan.changes)


def _plan_response(plan: Plan) -> PlanResponse:
    question, no_command = plan.question, launch.left_out(plan)
    return PlanResponse(
        question=QuestionPart(
            model=question.model_ref,
            gpus=str(question.cluster),
            goal=question.goal,
            seq_length=plan.recipe.data.seq_length,
            engine=question.engine,
            assumed=question.assumed,
        ),
        recipe=BaseRecipe(
            name=plan.base.name,
            match=plan.match,
            goal=plan.recipe.goal,
            benchmark=plan.recipe.benchmark,
            made_for=plan.base.cluster,
            approach=plan.approach,
        ),
        contract=contract_part(plan),
        layout=PlanLayout(**plan.layout_dict()),
        estimate=estimate_part(plan.estimate, plan.exists),
        changes=[copied(ChangePart, c) for c in plan.changes],
        findings=finding_parts(plan.findings),
        suggestions=plan.suggestions,
        options=plan.options or UNSET,
        repair=plan.repair or UNSET,
        contradiction=plan.contradiction or UNSET,
        published=plan.published or UNSET,
        commands=launch.commands_of(plan, no_command),
        no_command=no_command,
        notes=_notes(plan) or UNSET,
    )


def contract_part(plan: Plan) -> Contract:
    """Return the fields of a plan that determine the trained weights."""
    contract = plan.contract_dict()
    contract["peft"] = None if contract["peft"] is None else PeftPart(**contract["peft"])
    return Contract(**contract)


def estimate_response(plan: Plan, request: requests.Estimate | None = None) -> PlanResponse:
    """Return the response of estimate: a plan without what only a search gives."""
    response = _plan_response(plan)
    base = msgspec.structs.replace(response.recipe, match=UNSET, approach=UNSET)
    by_stage = _memory_by_stage(plan)
    return msgspec.structs.replace(
        response,
        recipe=base,
        suggestions=UNSET,
        published=UNSET,
        memory_by_stage_gib=by_stage,
        budget=_budget(plan, request),
    )


def _memory_by_stage(plan: Plan) -> dict[str, MemoryGib]:
    stages = enumerate(costs.memory_by_stage(plan.case))
    parts = (*costs.PARTS, "total")
    return {str(i): MemoryGib(**{part: round(float(getattr(m, part)), 4) for part in parts}) for i, m in stages}


def plans_response(ranking: Ranking, request: requests.Plan | None = None) -> PlansResponse:
    """Return the response of plan."""
    return PlansResponse(
        plans=[plan_response(plan, request) for plan in ranking.plans],
        pareto=_scores(ranking.pareto),
        dropped=ranking.dropped,
        searched=ranking.searched,
        findings=finding_parts(ranking.blocked.findings) if ranking.blocked else UNSET,
        repair=(ranking.blocked.repair if ranking.blocked else None) or UNSET,
        contradiction=(ranking.blocked.contradiction if ranking.blocked else None) or UNSET,
        fitting=_scores(ranking.fitting) or UNSET,
        notes=(_notes(ranking.plans[0]) or UNSET) if ranking.plans else UNSET,
    )


def _scores(candidates: Sequence[planner.Candidate]) -> list[LayoutScore]:
    return [copied(LayoutScore, c) for c in candidates]


def sizes_response(sizing: Sizing, request: requests.Size | None = None) -> SizesResponse:
    """Return the response of size."""
    return copied(SizesResponse, sizing)


@verb(requests.Scale)
def scale(request: requests.Scale) -> ScaleResponse:
    """Return the sizes of several GPU types."""
    values = msgspec.structs.asdict(request)
    sizings = {gpu: size(**values | {"gpu": gpu}) for gpu in request.gpu}
    return ScaleResponse(series=[copied(Series, one, gpu=gpu) for gpu, one in sizings.items()])


def schedule_response(line: costs.Timeline, request: requests.Schedule | None = None) -> ScheduleResponse:
    """Return the response of schedule."""
    return copied(ScheduleResponse, line)
