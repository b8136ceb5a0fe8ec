"""What may be asked over HTTP: one typed model for each question, with its limits."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

CONFIG: Final = "config.json"
Config = Literal["config.json"]


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


Word = Annotated[str, StringConstraints(max_length=200), AfterValidator(_printable)]
Override = Annotated[str, StringConstraints(max_length=500), AfterValidator(_printable)]
Overrides = Annotated[list[Override], Field(max_length=60, description="KEY=VALUE, e.g. layout.tp=4; may be repeated")]
Text = Annotated[str, StringConstraints(max_length=1_500_000)]
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_. -]{0,99}$")]
Format = Literal["toml", "yaml", "json", "python"]
Kind = Literal["models", "recipes", "targets", "gpus", "clusters", "goals", "engines", "frameworks"]


class VerbRequest(BaseModel):
    """A question."""

    model_config = ConfigDict(extra="forbid")

    def question(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The question and the texts that go with it."""
        return self.model_dump(exclude_none=True), {}


class Training(VerbRequest):
    """What all questions about a training share."""

    goal: Annotated[Word | None, Field(description="pretrain, sft or peft")] = None
    seq: Annotated[Word | None, Field(description="tokens in a sequence, e.g. 8192 or 8k")] = None
    engine: Annotated[Word, Field(description="what will run it")] = "meshwright"
    overrides: Overrides = []


class Advised(Training):
    """What a recipe is recommended for."""

    model: Annotated[Word, Field(description="a model's name or Hugging Face id", examples=["llama3-8b"])]
    gpus: Annotated[Word, Field(description="the cluster", examples=["8xH100", "4x8xH100"])]
    goal: Annotated[Word, Field(description="pretrain, sft or peft", examples=["sft"])]
    benchmark: bool = False


class Recommend(Advised):
    """Which recipe for this model on these GPUs?"""

    explain: bool = False


class Write(Advised):
    """That recipe in a framework's words."""

    to: Annotated[Word, Field(description="a framework", examples=["torchtitan"])]


class Plan(Training):
    """Which layouts are fastest?"""

    target: Annotated[Word, Field(description="a model or a recipe", examples=["llama3-70b"])]
    gpus: Annotated[Word, Field(examples=["64xH100"])]
    top: Annotated[int, Field(ge=1, le=100)] = 5
    everything: Annotated[bool, Field(description="also all layouts that fit, with memory and step time")] = False


class Estimate(Training):
    """How much memory and time does exactly this layout take?"""

    target: Annotated[Word, Field(description="a recipe or a model", examples=["llama3_70b_pretrain_config"])]
    gpus: Word | None = None


class Schedule(Estimate):
    """When does every pass of a pipeline run?"""

    first: Annotated[int | None, Field(ge=1, le=100_000, description="only so many of the step's micro batches")] = None


class Size(Training):
    """How many GPUs?"""

    model: Annotated[Word, Field(examples=["llama3-70b"])]
    gpu: Annotated[Word, Field(description="a GPU type", examples=["H100"])]
    goal: Annotated[Word, Field(examples=["pretrain"])]
    tokens: Annotated[Word | None, Field(description="token budget, e.g. 15T")] = None
    price: Annotated[float | None, Field(ge=0, lt=1e6, description="of one GPU for one hour")] = None


class Scale(Size):
    """What does each number of GPUs buy, for several GPU types?"""

    gpu: Annotated[list[Word], Field(min_length=1, max_length=6, examples=[["H100", "H200"]])]  # type: ignore[assignment]  # several


class Check(VerbRequest):
    """What is wrong with this recipe?"""

    target: Annotated[Word, Field(description="a recipe's name", examples=["llama3_8b_pretrain_config"])]
    gpus: Word | None = None
    engine: Word | None = None
    overrides: Overrides = []


class Export(VerbRequest):
    """This recipe in another framework's words."""

    target: Annotated[Word, Field(examples=["llama3_8b_pretrain_config"])]
    to: Annotated[Word, Field(description="a framework", examples=["torchtitan"])]
    gpus: Word | None = None
    overrides: Overrides = []


class Recipes(VerbRequest):
    """Which recipes are there?"""

    query: Word | None = None
    goal: Word | None = None
    family: Word | None = None
    benchmark: Annotated[bool, Field(description="the throughput recipes instead of the library")] = False


class Recipe(VerbRequest):
    """One recipe."""

    format: Annotated[Format | None, Field(description="also as text in this format")] = None
    overrides: Overrides = []


class Models(VerbRequest):
    """Which models are known?"""

    query: Word | None = None


class Rules(VerbRequest):
    """What is checked?"""

    query: Word | None = None
    pitfalls: bool = False


class Accuracy(VerbRequest):
    """How well do predictions meet measurements?"""

    points: Annotated[bool, Field(description="also every measurement with its prediction")] = False


class Complete(VerbRequest):
    """What may these letters become?"""

    kind: Kind
    query: Word = ""
    limit: Annotated[int, Field(ge=1, le=50)] = 12


class OwnModel(VerbRequest):
    """A question about a model by its config.json."""

    config: Annotated[Text, Field(description="the text of the model's config.json")]

    def question(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The question, in which the model is a file, and that file."""
        said = self.model_dump(exclude_none=True)
        return said, {CONFIG: said.pop("config")}


class RecommendOwn(Recommend, OwnModel):
    """Which recipe for the model of this config.json on these GPUs?"""

    model: Config = CONFIG


class WriteOwn(Write, OwnModel):
    """That recipe in a framework's words, for the model of this config.json."""

    model: Config = CONFIG


class PlanOwn(Plan, OwnModel):
    """Which layouts are fastest for the model of this config.json?"""

    target: Config = CONFIG


class EstimateOwn(Estimate, OwnModel):
    """How much memory and time does the model of this config.json take?"""

    target: Config = CONFIG


class ScheduleOwn(Schedule, OwnModel):
    """When does every pass of a pipeline run, for the model of this config.json?"""

    target: Config = CONFIG


class SizeOwn(Size, OwnModel):
    """How many GPUs for the model of this config.json?"""

    model: Config = CONFIG


class ScaleOwn(Scale, OwnModel):
    """What does each number of GPUs buy, for the model of this config.json?"""

    model: Config = CONFIG


class ModelOwn(OwnModel):
    """Which model does this config.json describe?"""

    name: Config = CONFIG


class OwnText(VerbRequest):
    """A question about a text that was sent along."""

    text: Annotated[Text, Field(description="the config, script or recipe; nothing in it is run")]
    name: Annotated[FileName, Field(description="its file name: the ending tells the format")]
    gpus: Word | None = None
    overrides: Overrides = []

    def question(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The question, in which the text is a file, and that file."""
        said = self.model_dump(exclude_none=True)
        name = said.pop("name")
        text = said.pop("text")
        return {**said, "target": name}, {name: text}


class CheckText(OwnText):
    """What is wrong with this config or launch script?"""

    name: FileName = "script.sh"
    framework: Annotated[Word | None, Field(description="whose words it is written in, when it does not show")] = None
    model: Annotated[Word | None, Field(description="what it trains, when it does not say")] = None
    advice: Annotated[bool, Field(description="also what could be better")] = False


class ExportText(OwnText):
    """This recipe of one's own in another framework's words."""

    name: FileName = "recipe.toml"
    to: Annotated[Word, Field(description="a framework", examples=["torchtitan"])]
