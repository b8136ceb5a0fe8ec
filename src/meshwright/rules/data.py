"""What is trained on, and in which form."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.memory import MEMORY_FIXES
from meshwright.rules.model_families import is_glm45, is_qwen3_next, is_qwen35
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import not_

INSTRUCTIONS = ("squad", "tulu3", "openmathinstruct2", "openmathinstruct2-thinking", "gsm8k")
IMAGE_SETS = ("cord-v2", "medpix", "raven", "rdr", "llava-video-178k", "local-vlm")
MOCK = "mock"


def _fine_tunes(c: Case) -> Column:
    return c.goal != "pretrain"


@rule(
    "data.mock-fine-tuning",
    "warning",
    "dataset",
    message="{goal} on mock data teaches the model noise",
    symptom="runs, and the model is worse than before",
    cause="mock data are random tokens, for smoke tests and benchmarks",
    fixes=({"dataset": lambda c: ["cord-v2"] if c.has_vision and c.images else ["squad"]},),
)
def fine_tuning_has_data(c: Case) -> Column:
    return _fine_tunes(c) & (c.dataset == MOCK) & not_(c.benchmark) & not_(c.is_diffusion)


@rule(
    "data.instructions-for-pretraining",
    "warning",
    "dataset",
    message="pretraining on the instruction set {dataset!r}",
    symptom="over-fitted within an hour: these sets have thousands of samples, not trillions of tokens",
    cause="instruction sets are made for fine-tuning",
    fixes=({"dataset": [MOCK]},),
)
def pretraining_has_text(c: Case) -> Column:
    return (c.goal == "pretrain") & (c.dataset in INSTRUCTIONS)


WITH_IMAGES: Fix = {"images": [True], "dataset": lambda c: [c.dataset if c.dataset in IMAGE_SETS else IMAGE_SETS[0]]}


@rule(
    "data.no-images",
    "warning",
    "images",
    message="a vision-language model is fine-tuned without images",
    symptom="runs, and what the model says about images is garbage afterwards",
    cause="text alone moves the language model away from what the vision tower feeds it",
    fixes=(
        WITH_IMAGES,
        *({**WITH_IMAGES, **room} for room in MEMORY_FIXES),
    ),  # the vision tower's activations need room too
    pitfall="VLM SFT missing image data",
)
def vision_models_see_images(c: Case) -> Column:
    return c.has_vision & _fine_tunes(c) & not_(c.images)


@rule(
    "data.text-set-with-images",
    "warning",
    "dataset",
    message="samples should carry images, but {dataset!r} is a text set",
    symptom="the loader finds no images, or the batch has none",
    cause="images=true needs a data set that has them",
    fixes=({"dataset": ["cord-v2"]},),
)
def image_sets_have_images(c: Case) -> Column:
    return c.images & (c.dataset in INSTRUCTIONS)


@rule(
    "data.images-without-eyes",
    "error",
    "images",
    message="samples carry images, but the model has no vision tower",
    symptom="unexpected keyword pixel_values in the first forward",
    cause="a text model takes tokens only",
    fixes=(
        {"images": [False]},
        {"images": [False], "dataset": ["squad"]},
    ),
)
def text_models_see_text(c: Case) -> Column:
    return c.images & not_(c.has_vision) & not_(c.is_diffusion)


@rule(
    "data.packing-micro-batch",
    "error",
    "micro_batch_size",
    engines=("megatron",),
    message="packed fine-tuning samples need micro batch 1, not {micro_batch_size}",
    symptom="micro batch size should be 1 when training with packed sequences",
    cause="a packed sample is a whole micro batch already; the attention kernel takes one list of documents",
    fixes=({"micro_batch_size": [1]}, {"packing": [False]}),
)
def packed_samples_come_singly(c: Case) -> Column:
    return c.packing & _fine_tunes(c) & (c.micro_batch_size > 1) & not_(c.images)  # images are packed inside the batch


@rule(
    "data.packing-refused",
    "error",
    "packing",
    engines=("megatron",),
    message="{family} models take no packed samples there",
    symptom="wrong attention across documents, or an assertion in the model's forward",
    cause="GLM-4.5, Qwen3-Next and Qwen3.5-VL do not read document borders on this engine",
    fixes=({"packing": [False], "pad_to_max_length": [False]},),
)
def model_reads_borders(c: Case) -> Column:
    return c.packing & (is_glm45(c) | is_qwen3_next(c) | is_qwen35(c))


@rule(
    "data.packing-prediction-layers",
    "warning",
    "mtp_loss",
    engines=("megatron",),
    message="multi-token prediction cannot be trained on packed samples",
    symptom="multi-token prediction is not supported with packed sequences",
    cause="the shifted targets would cross document borders",
    fixes=({"mtp_loss": [0.0]}, {"packing": [False]}),
)
def prediction_stays_in_documents(c: Case) -> Column:
    return c.packing & (c.mtp_layers > 0) & (c.mtp_loss > 0)


@rule(
    "data.packing-attention",
    "error",
    "attention",
    message="{attention} attention does not keep packed documents apart",
    symptom="documents attend to each other; the loss looks too good",
    cause="document borders are read by the variable-length kernels",
    fixes=({"attention": ["auto"]}, {"packing": [False]}),
)
def documents_stay_apart(c: Case) -> Column:
    return c.packing & (c.attention == "eager")


@rule(
    "data.padding-waste",
    "advice",
    "packing",
    engines=("meshwright", "megatron", "automodel"),
    message="short instruction samples are padded to {seq_length} tokens each",
    symptom="most of the step is spent on padding",
    cause="instruction sets have samples of a few hundred tokens",
    fixes=({"packing": [True]}, {"packing": [True], "micro_batch_size": [1]}),
)
def short_samples_are_packed(c: Case) -> Column:
    refuses = (is_glm45(c) | is_qwen3_next(c) | is_qwen35(c)) & (c.engine == "megatron")
    short = _fine_tunes(c) & (c.dataset in INSTRUCTIONS) & (c.seq_length >= 2048)
    return short & not_(c.packing) & not_(c.images) & not_(refuses)


@rule(
    "data.no-workers",
    "advice",
    "workers",
    message="data are read by the training process itself",
    symptom="the GPU waits for every batch",
    cause="without loader processes reading and tokenising happen between steps",
    fixes=({"workers": [4]},),
)
def loading_is_parallel(c: Case) -> Column:
    return (c.workers == 0) & (c.dataset != MOCK)
