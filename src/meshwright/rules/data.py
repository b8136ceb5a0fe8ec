"""Datasets, packing and images."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.recipes.padding import padding_of
from meshwright.recipes.text_data import INSTRUCTION_SETS as INSTRUCTIONS
from meshwright.rules.memory import MEMORY_FIXES
from meshwright.rules.model_families import is_glm45, is_qwen3_next, is_qwen35
from meshwright.rules.repeated_data import ENOUGH_STEPS, FEW_STEPS, smaller_batches
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import not_

IMAGE_SETS = ("cord-v2", "medpix", "raven", "rdr", "llava-video-178k", "local-vlm")
MOCK = "mock"
SHORTEST = 256  # tokens of a packed sample that a fix may set


def _fine_tunes(c: Case) -> Column:
    return c.goal != "pretrain"


def _is_mock(c: Case) -> Column:
    """Return whether random tokens are trained on: a blend replaces the dataset."""
    return (c.dataset == MOCK) & (not c.blend)


@rule(
    "data.mock-fine-tuning",
    "warning",
    "dataset",
    message="{goal} on mock data trains the model on random tokens",
    symptom="runs, but the model is worse afterwards",
    cause="mock data is random tokens, for smoke tests and benchmarks",
    fixes=({"dataset": lambda c: ["cord-v2"] if c.has_vision and c.images else ["squad"]},),
)
def fine_tuning_on_mock_data(c: Case) -> Column:
    return _fine_tunes(c) & _is_mock(c) & not_(c.benchmark) & not_(c.is_diffusion)


@rule(
    "data.instructions-for-pretraining",
    "warning",
    "dataset",
    message="pretraining on the instruction dataset {dataset!r}",
    symptom="overfits within an hour: instruction datasets have thousands of samples, not trillions of tokens",
    cause="instruction datasets are made for fine-tuning",
    fixes=({"dataset": [MOCK]},),
)
def pretraining_on_instructions(c: Case) -> Column:
    return (c.goal == "pretrain") & (c.dataset in INSTRUCTIONS)


WITH_IMAGES: Fix = {"images": [True], "dataset": lambda c: [c.dataset if c.dataset in IMAGE_SETS else IMAGE_SETS[0]]}


@rule(
    "data.no-images",
    "warning",
    "images",
    message="a vision-language model is fine-tuned without images (images=false)",
    symptom="runs, but the model's answers about images are garbage afterwards",
    cause="text-only training moves the language model away from the features of its vision encoder",
    fixes=(
        WITH_IMAGES,
        *({**WITH_IMAGES, **room} for room in MEMORY_FIXES),
    ),  # the vision encoder's activations need memory too
    pitfall="VLM SFT missing image data",
)
def fine_tuning_without_images(c: Case) -> Column:
    # One's own dataset without images is a choice: recommend and train say that they train on text.
    return c.has_vision & _fine_tunes(c) & not_(c.images) & (c.dataset in (MOCK, *IMAGE_SETS, *INSTRUCTIONS))


@rule(
    "data.text-set-with-images",
    "warning",
    "dataset",
    message="images=true, but {dataset!r} is a text dataset",
    symptom="the data loader finds no images, or the batch contains none",
    cause="images=true needs a dataset with images",
    fixes=({"images": [False]}, {"dataset": ["cord-v2"]}),
)
def images_from_text_dataset(c: Case) -> Column:
    return c.images & (c.dataset in INSTRUCTIONS)


@rule(
    "data.images-without-vision",
    "error",
    "images",
    message="images=true, but the model has no vision encoder",
    symptom="unexpected keyword argument pixel_values in the first forward pass",
    cause="a text model takes tokens only",
    fixes=({"images": [False]}, {"images": [False], "dataset": ["squad"]}),
)
def images_for_text_model(c: Case) -> Column:
    return c.images & not_(c.has_vision) & not_(c.is_diffusion)


@rule(
    "data.packing-micro-batch",
    "error",
    "micro_batch_size",
    engines=("megatron",),
    message="packed fine-tuning samples need micro_batch_size=1, not {micro_batch_size}",
    symptom="micro batch size should be 1 when training with packed sequences",
    cause="a packed sample is already a full micro batch; the attention kernel takes one list of documents",
    fixes=({"micro_batch_size": [1]}, {"packing": [False]}),
)
def packed_micro_batch_above_one(c: Case) -> Column:
    return (
        c.packing & _fine_tunes(c) & (c.micro_batch_size > 1) & not_(c.images)
    )  # samples with images are packed inside the batch


@rule(
    "data.packing-unsupported",
    "error",
    "packing",
    engines=("megatron",),
    message="{engine} does not support packed samples for {family} models",
    symptom="wrong attention across documents, or an assertion in the model's forward",
    cause="GLM-4.5, Qwen3-Next and Qwen3.5-VL ignore document boundaries on this engine",
    fixes=({"packing": [False], "pad_to_max_length": [False]},),
)
def model_ignores_document_boundaries(c: Case) -> Column:
    return c.packing & (is_glm45(c) | is_qwen3_next(c) | is_qwen35(c))


@rule(
    "data.packing-prediction-layers",
    "warning",
    "mtp_loss",
    engines=("megatron",),
    message="mtp_loss={mtp_loss}: multi-token prediction does not support packed samples",
    symptom="multi-token prediction is not supported with packed sequences",
    cause="the shifted targets would cross document boundaries",
    fixes=({"mtp_loss": [0.0]}, {"packing": [False]}),
)
def mtp_with_packing(c: Case) -> Column:
    return c.packing & (c.mtp_layers > 0) & (c.mtp_loss > 0)


@rule(
    "data.packing-attention",
    "error",
    "attention",
    message="attention={attention} does not mask packed documents from each other",
    symptom="documents attend to each other; the loss looks too good",
    cause="only the variable-length kernels read document boundaries",
    fixes=({"attention": ["auto"]}, {"packing": [False]}),
)
def attention_crosses_documents(c: Case) -> Column:
    return c.packing & (c.attention == "eager")


def _padded_to(c: Case) -> str:
    if padding_of(c.recipe, c.engine).to != "micro_batch":
        return f"are padded to {c.seq_length} tokens each"
    if c.micro_batch_size == 1:
        return "run one at a time, in matrices that are small for a GPU"
    return f"are padded to the longest of a micro batch, at most {c.seq_length} tokens"


@rule(
    "data.padding-waste",
    "advice",
    "packing",
    engines=("meshwright", "megatron", "automodel"),
    message="short instruction samples {padded}",
    symptom="most of the step is spent on padding tokens, or on small matrices",
    cause="samples of instruction datasets have a few hundred tokens",
    fixes=({"packing": [True]}, {"packing": [True], "micro_batch_size": [1]}),
    values={"padded": _padded_to},
)
def short_samples_padded(c: Case) -> Column:
    refuses = (is_glm45(c) | is_qwen3_next(c) | is_qwen35(c)) & (c.engine == "megatron")
    short = _fine_tunes(c) & (c.dataset in INSTRUCTIONS) & (c.seq_length >= 2048)
    return short & not_(c.packing) & not_(c.images) & not_(refuses)


@rule(
    "data.no-workers",
    "advice",
    "workers",
    message="workers=0: the training process reads the data itself",
    symptom="the GPU waits for every batch",
    cause="without loader workers, reading and tokenizing happen between steps",
    fixes=({"workers": [4]},),
)
def no_loader_workers(c: Case) -> Column:
    return (c.workers == 0) & not_(_is_mock(c))


@rule(
    "data.epochs-of-mock-data",
    "error",
    "epochs",
    message="epochs={epochs:g}, but mock data is generated without end: --dataset FILE trains on data that ends",
    symptom="the run has no length",
    cause="an epoch is one pass over a finite dataset",
    fixes=({"epochs": [0.0]},),
    engines=("meshwright",),
)
def epochs_of_mock_data(c: Case) -> Column:
    return (c.epochs > 0) & _is_mock(c)


@rule(
    "data.epochs-of-stream",
    "error",
    "epochs",
    message="epochs={epochs:g} with data.streaming, which does not count the samples in advance",
    symptom="the learning-rate schedule has no length",
    cause="streaming reads the data while it trains; the schedule needs the number of steps before",
    fixes=({"streaming": [False]},),
    engines=("meshwright",),
)
def epochs_of_stream(c: Case) -> Column:
    return (c.epochs > 0) & (c.streaming * True)


@rule(
    "data.grouping-packed",
    "error",
    "group_by_length",
    message="group_by_length=true with packing: packed samples all have the same length",
    symptom="packed samples all have the same length",
    cause="packing fills every sample up to seq_length, so there are no lengths to group by",
    fixes=({"group_by_length": [False]}, {"packing": [False]}),
    engines=("meshwright",),
)
def groups_packed_samples(c: Case) -> Column:
    return _fine_tunes(c) & (c.group_by_length & c.packing)


@rule(
    "data.grouping-parallel",
    "error",
    "group_by_length",
    message="group_by_length=true, but {parallel} samples of equal length, so grouping by length would save nothing",
    symptom="samples of equal length, so grouping by length would save nothing",
    cause="pipelines send activations of one shape, and context parallelism cuts every sample alike",
    fixes=(*({axis: [1]} for axis in ("pp", "cp")), {"pp": [1], "cp": [1]}, {"group_by_length": [False]}),
    engines=("meshwright",),
    values={"parallel": lambda c: "pipelines need" if c.pp > 1 else "context parallelism needs"},
)
def needs_equal_lengths(c: Case) -> Column:
    return _fine_tunes(c) & c.group_by_length & ((c.pp > 1) | (c.cp > 1))


@rule(
    "data.stream-lengths",
    "error",
    "streaming",
    message="streaming=true with {how}: streaming does not know sample lengths in advance",
    symptom="streaming does not know sample lengths in advance",
    cause="packing and grouping by length choose samples by length before the first step",
    fixes=({"streaming": [False]}, {"packing": [False], "group_by_length": [False]}),
    engines=("meshwright",),
    values={"how": lambda c: "packing" if c.packing else "group_by_length"},
)
def streams_unknown_lengths(c: Case) -> Column:
    return _fine_tunes(c) & c.streaming & (c.packing | c.group_by_length)


@rule(
    "data.epochs-of-blend",
    "error",
    "epochs",
    message="epochs={epochs:g} of a blend",
    symptom="the run has no length",
    cause="the sources of a blend have different sizes and weights, so their passes end at different steps",
    fixes=({"epochs": [0.0]},),
    engines=("meshwright",),
)
def epochs_of_blend(c: Case) -> Column:
    return (c.epochs > 0) & bool(c.blend or c.anneal_blend)


@rule(
    "data.anneal-incomplete",
    "error",
    "anneal_steps",
    message="annealing needs both anneal_steps (now {anneal_steps}) and anneal_blend (now {sources} sources)",
    symptom="annealing needs both data.anneal_steps and data.anneal_blend",
    cause="the last anneal_steps sample from the sources of anneal_blend",
    fixes=({"anneal_steps": lambda c: [max(c.steps // 10, 1)] if c.anneal_blend else [0]},),
    engines=("meshwright",),
    values={"sources": lambda c: len(c.anneal_blend)},
)
def anneal_incomplete(c: Case) -> Column:
    return (c.anneal_steps > 0) != bool(c.anneal_blend)


def _smaller_batches(c: Case) -> list[int]:
    """Return batches that make ENOUGH_STEPS of the counted samples, the largest first; else the smallest there is."""
    return smaller_batches(int(c.epoch_samples), int(c.micro_batch_size * c.dp))


def _smallest_batches(c: Case) -> list[int]:
    """Return the batches of `_smaller_batches` with one sample per micro batch."""
    return _smaller_batches(c.replace(micro_batch_size=1))


def _shorter_lengths(c: Case) -> list[int]:
    """Return the longest packed length that makes ENOUGH_STEPS with the smallest batch, else FEW_STEPS; no document is
    cut."""
    if not c.packed_tokens:
        return []
    least, unit = max(SHORTEST, int(c.longest_sample)), int(c.micro_batch_size * c.dp)
    halves = [int(c.seq_length) >> n for n in range(1, int(c.seq_length).bit_length())]
    tried = [(one, int(c.replace(seq_length=one).epoch_samples)) for one in halves if one >= least]
    enough = (one for steps in (ENOUGH_STEPS, FEW_STEPS) for one, samples in tried if samples >= steps * unit)
    return list(dict.fromkeys(enough))[:2]


def _batches_of_shorter(c: Case) -> list[int]:
    """Return the batches of `_smaller_batches` with the first shorter length."""
    return [batch for one in _shorter_lengths(c)[:1] for batch in _smaller_batches(c.replace(seq_length=one))]


@rule(
    "data.few-steps",
    "warning",
    "global_batch_size",
    message="the epochs have {samples} sample{s}, {updates} step{t} of {global_batch_size}: too few updates to learn",
    symptom="the loss hardly changes, and the trained weights are almost those of the start",
    cause="the batch is large for the data: every step is one update, however many samples it averages",
    fixes=(
        {"global_batch_size": _smaller_batches},
        {"micro_batch_size": [1], "global_batch_size": _smallest_batches},
        {"seq_length": _shorter_lengths, "global_batch_size": _batches_of_shorter},
        {"seq_length": _shorter_lengths},
    ),
    values={
        "updates": lambda c: int(c.updates),
        "samples": lambda c: int(c.epoch_samples),
        "s": lambda c: "s" * bool(c.epoch_samples != 1),
        "t": lambda c: "s" * bool(c.updates != 1),
    },
)
def few_steps(c: Case) -> Column:
    whole_file = (c.updates <= c.epochs) & (c.updates < ENOUGH_STEPS)  # a step averages over all of it
    return (c.samples > 0) & ((c.updates < FEW_STEPS) | whole_file)
