"""All findings specific to framework files, for lookup by id."""

from __future__ import annotations

from typing import NamedTuple

from meshwright import rules
from meshwright.frameworks.automodel.targets import TARGET_RULES
from meshwright.frameworks.front_ends import templates
from meshwright.frameworks.launch_checks import RULES as LAUNCH_RULES
from meshwright.frameworks.registry import READ, framework
from meshwright.recipes.types import ENGINES
from meshwright.rules import Rule, Severity


class ParseFinding(NamedTuple):
    """A finding reported by a parser, not by a rule."""

    id: str
    severity: Severity
    symptom: str
    cause: str


PARSE_FINDINGS = (
    *(ParseFinding(*one) for one in LAUNCH_RULES),
    ParseFinding(
        "model.differs",
        "warning",
        "another model is trained than the one meant",
        "the file's sizes and --model disagree, or --model replaces the model that the file names",
    ),
    ParseFinding(
        "model.contradicts",
        "error",
        "another model is trained than the one meant, and the figures are not the training's",
        "the file's sizes and --model give models whose parameters differ by more than 5 %",
    ),
    ParseFinding(
        "model.differs-from-name",
        "advice",
        "weights do not load, or another model is trained",
        "the file's sizes and the model that its tokenizer or weights name disagree",
    ),
    ParseFinding(
        templates.RULE,
        "warning",
        "the loss falls, but the model answers with another family's markers as text, or never stops",
        "the chat template is that of another model family: its markers are not in the tokenizer",
    ),
    ParseFinding(
        "saving.new-folder",
        "warning",
        "a requeued run starts anew",
        "the name of the checkpoints' folder has the date, or another text that changes at every start",
    ),
    ParseFinding(
        "saving.not-resumed",
        "warning",
        "every job trains the first hours again",
        "the job is requeued or shorter than the training, and does not load the checkpoints that it saves",
    ),
    ParseFinding(
        "saving.fills-disk",
        "warning",
        "the disk or the quota is full, and the training ends",
        "every checkpoint is kept, or one of few steps: together more than 150 TiB",
    ),
    ParseFinding("saving.never", "warning", "a crash loses the whole training", "checkpoints are off"),
    ParseFinding(
        "saving.only-at-the-end",
        "warning",
        "a crash loses the whole training",
        "the interval between checkpoints is longer than the training",
    ),
    ParseFinding(
        "saving.rarely",
        "warning",
        "a crash loses many hours",
        "the interval between checkpoints is 12 hours or more, or longer than the time limit of the job",
    ),
    ParseFinding(
        "engine.no-config",
        "error",
        "there is nothing to start the training with",
        "the config of the engine's framework has no model or key for it",
    ),
    ParseFinding(
        "data.missing-file",
        "warning",
        "the run ends at its start if the file is not there either",
        "a dataset is named by a path that this machine does not have",
    ),
    ParseFinding(
        "data.no-tokenizer",
        "error",
        "OSError or ValueError while the tokenizer is loaded",
        "a tokenizer is loaded from a folder or by a hub id; a config.json or an empty folder has none",
    ),
    ParseFinding(
        "launch.missing-config",
        "error",
        "FileNotFoundError at start-up",
        "a command names a config file that is not in its folder; a warning if the folder is not here either",
    ),
    ParseFinding(
        "data.no-validation",
        "warning",
        "the run ends at its start",
        "train.eval_every asks for validations, but neither data.validation nor data.validation_part is set",
    ),
    ParseFinding(
        "data.rows",
        "error",
        "the run ends while it prepares the data",
        "rows of a dataset cannot be parsed, or have no columns to train on",
    ),
    ParseFinding(
        "data.few-updates",
        "advice",
        "the adapter is hardly trained",
        "the samples of a fine-tuning give few updates at this batch",
    ),
    ParseFinding(
        "data.unused-answers",
        "warning",
        "the model continues the texts, and predicts no label",
        "a fine-tuning on a column of texts does not use the column of labels or answers beside it",
    ),
    ParseFinding(
        "key.unknown", "error", "the program fails at start-up or drops the setting", "the framework has no such key"
    ),
    ParseFinding("key.unused", "warning", "the setting has no effect", "the framework does not read this key"),
    ParseFinding("key.missing", "error", "the program fails at start-up", "the framework requires the key"),
    ParseFinding(
        "data.columns-not-read",
        "error",
        "KeyError of a column while the data is prepared",
        "the type of a dataset reads other columns than its file has",
    ),
    ParseFinding("key.removed", "error", "unrecognized argument or key", "the key was removed or renamed"),
    ParseFinding(
        "key.ignored", "warning", "the setting has no effect", "the key is accepted for backward compatibility only"
    ),
    ParseFinding(
        "key.repeated", "error", "the first value is lost, or the file is refused", "a YAML file sets the key twice"
    ),
    ParseFinding("key.overwritten", "warning", "training uses a different value", "a later step overwrites this key"),
    ParseFinding(
        "value.invalid", "error", "parser error, or a failure much later", "the key does not accept this value"
    ),
    ParseFinding("value.missing", "error", "expected at least one argument", "the flag needs a value"),
    ParseFinding("value.stray", "error", "unrecognized arguments", "the argument belongs to no flag"),
    ParseFinding("value.replaced", "warning", "only the last value takes effect", "the flag is given more than once"),
    ParseFinding("torchtitan.toml-removed", "error", "unrecognized options", "torchtitan no longer reads TOML"),
    ParseFinding("torchtitan.preset", "error", "no such module or config", "presets are functions of the named module"),
    ParseFinding(
        "torchtitan.other-version", "error", "unrecognized options", "the flag belongs to another release line"
    ),
    ParseFinding("torchtitan.stray-argument", "error", "unrecognized arguments", "the argument belongs to no flag"),
    ParseFinding(
        "automodel.no-recipe", "error", "the command does not know what to run", "the file names no recipe class"
    ),
    *(ParseFinding(one.id, one.severity, one.symptom, one.cause) for one in TARGET_RULES),
    ParseFinding("automodel.old-command", "error", "no such command", "the command-line syntax changed"),
    ParseFinding(
        "megatron-deepspeed.config",
        "error",
        "JSONDecodeError while the config is opened",
        "the DeepSpeed config that the script names or writes is not JSON",
    ),
    ParseFinding(
        "megatron-deepspeed.auto",
        "error",
        "TypeError or ValidationError while DeepSpeed reads its config",
        "only transformers and accelerate replace auto in a DeepSpeed config",
    ),
    ParseFinding("deepspeed.argument-mismatch", "error", "ValueError from the Trainer", "file and arguments disagree"),
    ParseFinding(
        "deepspeed.argument-refused",
        "error",
        "the program's parser refuses an argument when it starts",
        "switches of the Trainer are True or False, and some arguments are one of a few words",
    ),
    ParseFinding(
        "accelerate.argument-refused",
        "error",
        "the program's parser refuses an argument when it starts",
        "switches of the Trainer are True or False, and some arguments are one of a few words",
    ),
    *(
        ParseFinding(
            f"{framework}.arguments-ignored",
            "warning",
            "the run has the values of the program's code",
            "the program parses no arguments, so those of the command are ignored",
        )
        for framework in ("accelerate", "deepspeed")
    ),
    ParseFinding(
        "accelerate.double-checkpointing",
        "error",
        "an error, or recompute runs twice",
        "both the file and the program enable it",
    ),
    ParseFinding(
        "accelerate.fp16-weights",
        "error",
        "ValueError: Attempting to unscale FP16 gradients",
        "torch's GradScaler unscales gradients in fp32 only, so trained weights must be in fp32",
    ),
    ParseFinding("accelerate.not-json", "error", "JSON parse error at start-up", "the text is parsed as JSON"),
)


def rules_of(name: str) -> list[Rule]:
    """Return the rules of a framework, including parser findings."""
    theirs = framework(name)
    found = [ParseFinding(one.id, one.severity, one.symptom, one.cause) for one in theirs.rules]
    listed = {one.id for one in found}
    from_parser = [one for one in PARSE_FINDINGS if one.id.startswith(f"{name}.") and one.id not in listed]
    return [_rule(one, name, (theirs.engine,)) for one in (*found, *from_parser)]


def find_rules(query: str) -> list[Rule]:
    """Return framework rules whose id contains the query."""
    parsed = [(one.id.split(".")[0], one) for one in PARSE_FINDINGS]
    shared = [_rule(one, subject, ENGINES) for subject, one in parsed if subject not in READ]
    every = [*shared, *(rule for name in READ for rule in rules_of(name))]
    return [rule for rule in every if query.lower() in rule.id.lower()]


def all_rules() -> dict[str, Rule]:
    """Return every rule that a finding may name, by id: ours, those of extensions, the frameworks' and the parsers'."""
    parsed = [_rule(one, one.id.split(".")[0], ENGINES) for one in PARSE_FINDINGS]
    theirs = [rule for name in READ for rule in rules_of(name)]
    return {rule.id: rule for rule in (*parsed, *theirs, *rules.all_rules().values())}


def _rule(finding: ParseFinding, subject: str, engines: tuple[str, ...]) -> Rule:
    return Rule(
        id=finding.id,
        subject=subject,
        severity=finding.severity,
        field="",
        broken=lambda case: False,
        message="",
        symptom=finding.symptom,
        cause=finding.cause,
        fixes=(),
        engines=engines,
    )
