"""Take users' own files through export, recommend and launch, and check what is written, printed and announced.

    python -m benchmarks.file_to_file [--only CASE,…] [--to FRAMEWORK,…] [--paths export,saved,launch] [--out OUT.json]

Every case is a folder of `tests/frameworks/user_files`: files as users of each framework write them. Each goes through
three paths to every export target: `export`, `recommend --save` then `export`, and `launch --write`. For each written
file this reports: text that does not parse, fields that read back differently without a word in the output and in the
file, paths that are not there, printed commands of ours that are refused, and a verdict of `check` that changed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import msgspec
import yaml

from meshwright.api.targets import Job, job_for
from meshwright.choices import FRAMEWORKS
from meshwright.cli.run import run
from meshwright.errors import MeshwrightError
from meshwright.frameworks.export_recipe import KEPT, is_same
from meshwright.frameworks.mapping import relevant_fields
from meshwright.frameworks.run_tokenizer import tokenizer_of
from meshwright.recipes import overrides as override
from meshwright.recipes.types import Recipe, field_value

ROOT = Path(__file__).parents[1]
FILES = ROOT / "tests" / "frameworks" / "user_files"
PATHS = ("export", "saved", "launch")
ROWS = 120


class UserFile(NamedTuple):
    """A user's file, the GPUs it is for, and options that a command on it needs."""

    case: str
    file: str
    gpus: str
    options: tuple[str, ...] = ()


CASES = (
    UserFile("mlm_dense", "pretrain_3b.sh", "4x8xH100"),
    UserFile("mlm_sentencepiece", "run.sh", "8xH100"),
    UserFile("mlm_gpt2_bpe", "run.sh", "8xH100"),
    UserFile("mlm_moe", "mixtral.sh", "4x8xH100"),
    UserFile("mlm_ropescaling", "cpt.sh", "2x8xH100"),
    UserFile("mlm_70b_fp8", "run70b.sh", "8x8xH100"),
    UserFile("titan_8b", "train.toml", "4x8xH100"),
    UserFile("titan_cpt", "cpt.toml", "8xH200"),
    UserFile("titan_moe", "dsv3.toml", "8xH100"),
    UserFile("titan_qwen3", "run.sh", "8xH100"),
    UserFile("am_sft", "sft.yaml", "8xH100"),
    UserFile("am_lora", "lora.yaml", "2xH100"),
    UserFile("am_moe", "pretrain.yaml", "4x8xH100"),
    UserFile("am_squad", "squad.yaml", "8xH100"),
    UserFile("ds_sft", "run.sh", "8xH100"),
    UserFile("ds_clm", "run.sh", "8xA100-80"),
    UserFile("ds_offload", "train.sh", "8xH100"),
    UserFile("acc_trl_sharegpt", "sft.sh", "8xH100"),
    UserFile("acc_trl_lora", "lora.sh", "8xH100"),
    UserFile("trl_cli", "sft.sh", "8xH100"),
    UserFile("trl_qlora", "qlora.sh", "2xRTX4090"),
    UserFile("trl_dpo", "dpo.sh", "1xH100"),
    UserFile("trl_grpo", "grpo.sh", "8xH100"),
    UserFile("trl_py", "train.py", "1xH100"),
    UserFile("hf_py", "train.py", "4xH100"),
    UserFile("hf_clm_scratch", "run_clm.sh", "4xA100-80", ("--model", "./config.json")),
    UserFile("unsloth_py", "unsloth_train.py", "1xRTX4090"),
    UserFile("axolotl_qlora", "axolotl.yml", "1xRTX4090"),
    UserFile("axolotl_full", "full.yml", "8xA100-80"),
    UserFile("lf_lora", "lf.yaml", "1xH100"),
    UserFile("mb_override", "sft.py", "8xH100"),
    UserFile("mb_cmd", "run.sh", "2x8xH100"),
    UserFile("kf_7b", "train.toml", "4x4xH200"),
    UserFile("kf_moe", "train.toml", "8x4xH200"),
    UserFile("kf_wikitext", "train.toml", "4xH100"),
    UserFile("own_sft", "my.toml", "8xH100"),
    UserFile("own_pretrain", "pre.toml", "4x8xH100"),
    UserFile("own_model", "own.toml", "8xH100"),
    UserFile("own_qlora", "q.toml", "1xRTX4090"),
)


class Problem(NamedTuple):
    """What is wrong with one path of one case."""

    case: str
    path: str
    to: str
    kind: str  # crash, syntax, silent, not in file, missing path, refused command, verdict
    text: str


class Output(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    out: str
    words: tuple[str, ...]

    def sections(self) -> dict[str, list[str]]:
        """Return the lines of a report by the title at their start."""
        found: dict[str, list[str]] = {}
        title = ""
        for line in self.out.splitlines():
            match = re.match(r"(\w[\w ]{0,8}?):?\s+(?=\S)", line) if line[:1].strip() else None
            title = match[1].strip() if match else title
            found.setdefault(title, []).append(line[match.end() :] if match else line.strip())
        return found


@contextlib.contextmanager
def wide_terminal() -> Iterator[None]:
    """Print without line breaks, so that a printed command is one line."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100000"
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def call(*words: str) -> Output:
    """Run one command in this process, as it is typed."""
    out = io.StringIO()
    code: int | str | None = 0
    with wide_terminal(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            run(list(words))
        except SystemExit as ended:
            code = ended.code
        except Exception as error:  # a crash is a finding of the sweep
            code = f"crash: {type(error).__name__}: {error}"
    printed = out.getvalue()
    if isinstance(code, str):
        return Output(99, f"{printed}\n{code}", words)
    return Output(int(code or 0), printed, words)


def prepare(user: UserFile, folder: Path) -> None:
    """Copy a case's files, with the data, tokenizer and weights that they name."""
    shutil.copytree(FILES / user.case, folder, dirs_exist_ok=True)
    data = folder / "data"
    (data / "text").mkdir(parents=True, exist_ok=True)
    (data / "sft").mkdir(exist_ok=True)
    turns = [("What is %d?", "It is the number %d, which follows the one before it.")]
    rows = [[(q % n, a % n) for q, a in turns] for n in range(ROWS)]

    def write(name: str, lines: Iterator[object]) -> None:
        (data / name).write_text("".join(json.dumps(one) + "\n" for one in lines))

    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for ((q, a),) in rows]
    write("messages.jsonl", ({"messages": one} for one in chats))
    write("val_messages.jsonl", ({"messages": one} for one in chats[:20]))
    shared = (([{"from": "human", "value": q}, {"from": "gpt", "value": a}]) for ((q, a),) in rows)
    write("sharegpt.jsonl", ({"conversations": one} for one in shared))
    write("alpaca.jsonl", ({"instruction": q, "input": "", "output": a} for ((q, a),) in rows))
    for name in ("training", "validation"):
        write(f"sft/{name}.jsonl", ({"input": q, "output": a} for ((q, a),) in rows))
    for name in ("corpus.txt", "val.txt", "text/part.txt"):
        (data / name).write_text("\n".join(a for ((_, a),) in rows))
    for name in ("train", "valid", "val", "web", "code"):
        for end in ("bin", "idx"):
            (data / f"{name}_text_document.{end}").write_bytes(b"\0" * 64)
    shutil.copytree(_tokenizer(), folder / "tok", dirs_exist_ok=True)
    (folder / "tok" / "tokenizer.model").write_bytes(b"\0")
    if user.case == "mlm_gpt2_bpe":  # the two files of its tokenizer, and no other
        for path in (folder / "tok").iterdir():
            path.unlink()
        (folder / "tok" / "gpt2-vocab.json").write_text('{"a": 0, "<|endoftext|>": 1}')
        (folder / "tok" / "gpt2-merges.txt").write_text("#version: 0.2\n")
    if user.case == "titan_cpt":
        shutil.copytree(_tokenizer(), folder / "assets" / "hf" / "Llama-3.1-8B")


def _tokenizer() -> Path:
    """Return a folder with a small tokenizer, made once."""
    folder = Path(tempfile.gettempdir()) / f"file_to_file_tokenizer_{os.getpid()}"
    if not folder.exists():
        from tokenizers import Tokenizer, models

        folder.mkdir()
        Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "eos_token": "a"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


# -- checks of what was written


def unparsed(path: Path) -> str:
    """Return why a written file cannot be parsed by the program that reads it; empty if it can."""
    text = path.read_text()
    try:
        if path.suffix == ".py":
            ast.parse(text)
        elif path.suffix == ".toml":
            tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            list(yaml.safe_load_all(text))
        elif path.suffix == ".json":
            json.loads(text)
        elif path.suffix in (".sh", ".sbatch") or text.startswith("#!"):
            done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
            return done.stderr.strip()
    except (SyntaxError, ValueError, yaml.YAMLError) as error:
        return str(error)
    return ""


def read(file: str, gpus: str, options: Sequence[str] = ()) -> Job:
    """Read a file as every command does."""
    model = options[options.index("--model") + 1] if "--model" in options else None
    changes = [one for one in options if "=" in one]
    job = job_for(file, None, gpus, changes, model=model)
    if job.imported is None and changes:
        return msgspec.structs.replace(job, recipe=override.apply(job.recipe, changes))
    return job


DECISIVE = (
    "architecture.", "data.dataset", "data.blend", "data.tokenizer", "data.seq_length", "data.packing", "data.columns",
    "data.split", "data.validation", "data.train_on", "train.global_batch_size", "train.steps", "train.epochs",
    "train.seed", "train.init_std", "train.eval_every", "optimizer.", "schedule.", "precision.", "peft.", "layout.tp",
    "layout.pp", "layout.cp", "layout.ep", "layout.vp", "layout.micro_batch_size", "layout.recompute",
    "layout.offload", "moe.", "checkpoint.pretrained", "checkpoint.save_every", "checkpoint.keep",
)  # fmt: skip


def shape(job: Job) -> dict[str, object]:
    """Return the numbers of a model that decide what is trained."""
    spec = msgspec.to_builtins(job.model)
    described = ("name", "hf_id", "title", "aliases", "notes", "max_seq_length", "tags", "source", "published_total")
    classes = ("family", "model_type", "hf_class")  # files of sizes, such as Megatron-LM's, name no class
    return {f"model.{key}": value for key, value in spec.items() if key not in (*described, *classes)}


def decisive(recipe: Recipe, job: Job) -> list[str]:
    """Return the fields of a recipe that decide what is trained, and how."""
    return [key for key in relevant_fields(recipe, job.model) if key.startswith(DECISIVE)]


def value_of(recipe: Recipe, job: Job, key: str) -> object:
    """Return a field's value, with paths from the folder of the case."""
    value = field_value(recipe, key)
    fine_tuned = recipe.goal != "pretrain" and key == "checkpoint.pretrained"
    if not value and key == "data.tokenizer":
        return tokenizer_of(recipe, job.model)
    if not value and fine_tuned:
        return job.model.hf_id
    if key == "data.validation" and not value and recipe.data.validation_part:
        return ""
    return value


def same_path(one: object, two: object, folder: Path, written: Path) -> bool:
    """Return whether two values name the same file: absolute, or from the folder of the case or of the export."""
    if isinstance(one, dict) and isinstance(two, dict):
        pairs = zip(one.items(), two.items(), strict=False)
        same = (same_path(a, b, folder, written) and x == y for (a, x), (b, y) in pairs)
        return len(one) == len(two) and all(same)
    if not isinstance(one, str) or not isinstance(two, str):
        return False
    bases = (folder, written)
    return bool({(a / one).resolve() for a in bases} & {(b / two).resolve() for b in bases}) or (
        Path(two).name == f"{Path(one).name.partition('.')[0]}.messages.jsonl"
    )


def differences(before: Job, after: Job, folder: Path, written: Path) -> Iterator[tuple[str, object, object]]:
    """Yield the decisive fields that a written file has otherwise."""
    mine, theirs = before.on(after.engine), after.recipe
    for key in dict.fromkeys((*decisive(mine, before), *decisive(theirs, after))):
        old, new = value_of(mine, before, key), value_of(theirs, after, key)
        if is_same(key, new, old) or same_path(old, new, folder, written):
            continue
        if key == "train.steps" and mine.train.epochs and theirs.train.epochs:
            continue
        if key in KEPT and KEPT[key](mine) == KEPT[key](theirs):
            continue
        yield key, old, new
    shapes = shape(before), shape(after)
    other = [key for key, old in shapes[0].items() if shapes[1].get(key) != old]
    if other:
        yield "model", before.model.name, f"{after.model.name}, by {', '.join(other)}"


def own_commands(output: Output) -> Iterator[str]:
    """Yield the commands of ours that a report prints to be typed as they are."""
    for line in output.out.splitlines():
        text = line.strip()
        fix = re.search(r"(?:^|\s)fix:\s+(.*)$", text)
        for part in (fix[1] if fix else text).split(" | "):
            found = re.search(
                r"(?:^|\s)(meshwright (?:recommend|export|launch|check|train|plan|estimate|import) .*)$", part
            )
            if found and not re.search(r"\b(MODEL|FILE|KEY=VALUE|PATH|DIR|N|…)\b|…|\bsteps=N\b", found[1]):
                yield re.split(r"  +|[:;,]? \(|[:;] | # ", found[1])[0].rstrip(".,;:")


def fixes(output: Output) -> Iterator[str]:
    """Yield the fixes of a refusal: one is to be typed after the command."""
    for line in output.out.splitlines():
        if (found := re.match(r"\s*fix:\s+(.*)$", line)) is not None:
            yield from found[1].split(" | ")


NAMED = re.compile(r"[\w./~-]*/[\w./-]+|[\w-]+\.(?:jsonl|json|yaml|toml|txt|py|model)\b")


def paths_in(text: str, folder: Path) -> Iterator[str]:
    """Yield names in a text that are files of the case when read from its folder or by their end."""
    written = tuple(f"{one}_" for one in PATHS)
    own = (path for path in folder.rglob("*") if not path.relative_to(folder).parts[0].startswith(written))
    known = {path.name for path in own}
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        for found in NAMED.findall(line):
            if "/" in found and not found.startswith("/") and Path(found).name in known and "." in Path(found).name:
                yield found


# -- the paths


class Sweep:
    """Runs the paths of the cases and collects what is wrong."""

    def __init__(self, targets: Sequence[str], paths: Sequence[str]) -> None:
        self.targets, self.paths = targets, paths
        self.problems: list[Problem] = []
        self.swept = 0
        self.refused: list[Problem] = []
        self.typed: dict[tuple[str, str], Output] = {}

    def add(self, user: UserFile, path: str, to: str, kind: str, text: str) -> None:
        """Add one problem."""
        self.problems.append(Problem(user.case, path, to, kind, text))

    def case(self, user: UserFile) -> None:
        """Run every path of a case, in a folder of its own."""
        before = Path.cwd()
        with tempfile.TemporaryDirectory(prefix="file_to_file_") as name:
            folder = Path(name).resolve()
            prepare(user, folder)
            os.chdir(folder)
            try:
                self._case(user, folder)
            finally:
                os.chdir(before)

    def _case(self, user: UserFile, folder: Path) -> None:
        checked = call("check", user.file, "--gpus", user.gpus, *user.options)
        self.commands(user, "check", "", checked)
        source, options = user.file, user.options
        try:
            job = read(source, user.gpus, options)
        except MeshwrightError:
            source = self.other_trainer(user)
            if not source:
                return
            options = ()
            job = read(source, user.gpus)
        saved = source
        if "saved" in self.paths and source == user.file:
            saved = "saved.toml"
            planned = call("recommend", source, "--gpus", user.gpus, "--save", saved, *options)
            self.commands(user, "saved", "", planned)
            if planned.code:
                self.add(user, "saved", "", "refused", _last(planned))
                saved = ""
            else:
                self.compare(user, "saved", "recommend", job, Path(saved), planned, folder, plan=True)
        for to in self.targets:
            if "export" in self.paths:
                self.export(user, "export", to, source, job, folder, options)
            if "saved" in self.paths and saved and saved != source:
                self.export(user, "saved", to, saved, read(saved, user.gpus), folder, ())
            if "launch" in self.paths:
                self.launch(user, to, source, job, folder, options)

    def other_trainer(self, user: UserFile) -> str:
        """Save the plan that the refusal of a file prints; return its file."""
        refused = call("recommend", user.file, "--gpus", user.gpus, *user.options)
        command = next((one for one in own_commands(refused) if one.startswith("meshwright recommend")), "")
        if not command:
            self.add(user, "recommend", "", "no way out", _last(refused))
            return ""
        planned = call(*shlex.split(command)[1:], "--save", "saved.toml")
        if planned.code:
            self.add(user, "recommend", "", "refused command", f"{command} → {_last(planned)}")
            return ""
        self.commands(user, "recommend", "", planned)
        return "saved.toml"

    def export(
        self, user: UserFile, path: str, to: str, source: str, job: Job, folder: Path, options: Sequence[str]
    ) -> None:
        """Export one file to one framework, and check what is written."""
        out = folder / f"{path}_{to}"
        words = ["export", source, "--to", to, "--gpus", user.gpus, "--out", str(out), *options]
        done, changes = self.until_written(user, path, to, words)
        if done is None:
            return
        if changes:
            job = read(source, user.gpus, (*options, *changes))
        self.written(user, path, to, out, done, folder)
        first = _first_written(done)
        if first is not None:
            self.compare(user, path, to, job, first, done, folder)
        self.commands(user, path, to, done)

    def launch(self, user: UserFile, to: str, source: str, job: Job, folder: Path, options: Sequence[str]) -> None:
        """Write one file's job for one framework, and check what is written."""
        out = folder / f"launch_{to}"
        words = ["launch", source, "--to", to, "--scheduler", "slurm", "--gpus", user.gpus, "--time", "24:00:00"]
        done, changes = self.until_written(user, "launch", to, [*words, "--write", str(out), *options])
        if done is None:
            return
        if changes:
            job = read(source, user.gpus, (*options, *changes))
        self.written(user, "launch", to, out, done, folder)
        files = [path for path in sorted(out.rglob("*")) if path.is_file()]
        jobs = [path for path in files if path.suffix == ".sbatch" or path.name.endswith("slurm.sh")]
        first = next(iter(jobs), None) or next(iter(files), None)
        if first is not None:
            self.compare(user, "launch", to, job, first, done, folder)
        self.commands(user, "launch", to, done)

    def until_written(
        self, user: UserFile, path: str, to: str, words: Sequence[str]
    ) -> tuple[Output | None, tuple[str, ...]]:
        """Run a command that writes; where it is refused, type the first fix that is an override, twice at most."""
        self.swept += 1
        changes: tuple[str, ...] = ()
        for _ in range(3):
            done = call(*words, *changes)
            if done.code == 0:
                return done, changes
            if done.code == 99:
                self.add(user, path, to, "crash", _last(done))
                return None, ()
            found = [one for one in fixes(done) if re.fullmatch(r"[\w.]+=[^ ]+", one.strip())]
            usable = [one for one in found if not one.endswith("=N")]
            if not usable:
                break
            changes = (*changes, usable[0])
        if (moved := self.sized(user, path, to, words, done)) is not None:
            return moved, ()
        kind = "refused" if "fix:" in done.out else "no way out"
        note = Problem(user.case, path, to, kind, _last(done))
        (self.refused if kind == "refused" else self.problems).append(note)
        return None, ()

    def sized(self, user: UserFile, path: str, to: str, words: Sequence[str], refused: Output) -> Output | None:
        """Type the command that a refused export prints for a layout that runs, then export that."""
        found = re.search(r"for a layout that runs: (meshwright recommend .*), then export sized.toml", refused.out)
        if found is None or words[0] != "export":
            return None
        planned = call(*shlex.split(found[1])[1:])
        if planned.code:
            self.add(user, path, to, "refused command", f"{found[1]} → {_last(planned)}")
            return None
        done = call("export", "sized.toml", *words[2:])
        if done.code:
            self.add(user, path, to, "refused command", f"export sized.toml --to {to} → {_errors(done)}")
        return None

    def written(self, user: UserFile, path: str, to: str, out: Path, done: Output, folder: Path) -> None:
        """Check that written files parse, and that the paths in them are there from the folder of the start."""
        files = [one for one in sorted(out.rglob("*")) if one.is_file()]
        if not files:
            self.add(user, path, to, "nothing written", _last(done))
        for file in files:
            if why := unparsed(file):
                self.add(user, path, to, "syntax", f"{file.name}: {why}")
            if file.suffix in (".jsonl", ".txt"):
                continue
            for name in dict.fromkeys(paths_in(file.read_text(), folder)):
                if not (out / name).exists():
                    self.add(user, path, to, "missing path", f"{file.name}: {name}")
        for title in ("Start", "Command"):
            for line in done.sections().get(title, ()):
                for name in dict.fromkeys(paths_in(line, folder)):
                    if not (out / name).exists():
                        self.add(user, path, to, "missing path", f"Start: {name}")

    def compare(
        self, user: UserFile, path: str, to: str, job: Job, file: Path, done: Output, folder: Path, plan: bool = False
    ) -> None:
        """Read a written file, and check that every decisive difference is announced in the output and in the file."""
        try:
            after = read(str(file), user.gpus)
        except MeshwrightError as error:
            try:
                after = read(str(file), user.gpus, ("--model", job.recipe.model))
            except MeshwrightError:
                self.add(user, path, to, "unreadable", f"{file.name}: {error}")
                return
        texts = "\n".join(one.read_text() for one in file.parent.iterdir() if one.suffix != ".jsonl" and one.is_file())
        typed = {one.partition("=")[0] for one in done.words if "=" in one}
        for key, old, new in differences(job, after, folder, file.parent):
            if key in typed or (key == "train.epochs" and "train.steps" in typed):
                continue
            if plan and key.startswith(("layout.", "kernels.", "precision.", "moe.")):
                continue
            last = key.rsplit(".", 1)[-1]
            if key in ("checkpoint.pretrained", "data.tokenizer") and old and str(old) in texts:
                continue  # named in the file where our reader does not look, such as the weights to convert
            label = f"{key}: {old!r} → {new!r}"
            if key not in done.out and f"{last}=" not in done.out:
                self.add(user, path, to, "silent", label)
            elif key not in texts and not plan:
                self.add(user, path, to, "not in file", label)
        if not plan:
            self.verdict(user, path, to, file)

    def verdict(self, user: UserFile, path: str, to: str, file: Path) -> None:
        """Check the written file: it has the errors that the user's file has, and no others."""
        before = call("check", user.file, "--gpus", user.gpus, *user.options)
        after = call("check", str(file), "--gpus", user.gpus)
        if after.code and not before.code:
            self.add(user, path, to, "verdict", f"{file.name}: {_errors(after)}")

    def commands(self, user: UserFile, path: str, to: str, output: Output) -> None:
        """Type the printed commands of ours."""
        for command in dict.fromkeys(own_commands(output)):
            try:
                words = shlex.split(command)[1:]
            except ValueError as error:
                self.add(user, path, to, "refused command", f"{command}: {error}")
                continue
            if words[0] == "train":
                words = ["check", *(one for one in _without(words[1:], ("--dataset", "--nproc", "--out", "--tiny")))]
                if "--gpus" not in words:
                    words += ["--gpus", user.gpus]
            if words[0] == "launch" and "--submit" in words:
                continue
            key = (user.case, command)
            if key in self.typed:
                continue
            self.typed[key] = done = call(*words)
            refused = done.code not in ((0, 1) if words[0] == "check" else (0,))
            if refused:
                self.add(user, path, to, "refused command", f"{command} → {_last(done)}")


def _without(words: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    """Yield words without options of another verb; a dataset stays as an override."""
    rest = iter(words)
    for word in rest:
        if word not in options:
            yield word
        elif word != "--tiny":
            value = next(rest, "")
            if word == "--dataset":
                yield f"data.dataset={value}"


def _first_written(done: Output) -> Path | None:
    """Return the file that starts a training: the script of the user's program, else the first config."""
    paths = [Path(line.split("  ")[0]) for line in done.sections().get("Wrote", ())]
    script = next((one for one in paths if one.suffix == ".sh" and paths[0].suffix in (".json", ".yaml")), None)
    return script or next(iter(paths), None)


def _last(done: Output) -> str:
    lines = [line for line in done.out.splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith(("error", "fix", "crash"))]
    return " / ".join((marked or lines)[-4:])[:600]


def _errors(done: Output) -> str:
    found = [line.strip() for line in done.out.splitlines() if "error" in line]
    return " / ".join(found[:3])[:600] or _last(done)


def swept(
    only: Sequence[str] = (), targets: Sequence[str] = FRAMEWORKS, paths: Sequence[str] = PATHS, log: bool = False
) -> Sweep:
    """Run the sweep and return what it found."""
    found = Sweep(targets, paths)
    for user in CASES:
        if only and user.case not in only:
            continue
        started, count = monotonic(), len(found.problems)
        found.case(user)
        if log:
            print(f"{user.case}: {len(found.problems) - count} problems, {monotonic() - started:.0f} s", flush=True)
            for one in found.problems[count:]:
                print(f"  {one.path} → {one.to}: {one.kind}: {one.text}", flush=True)
    return found


def main() -> None:
    """Run the sweep from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--only", default="")
    parser.add_argument("--to", default=",".join(FRAMEWORKS))
    parser.add_argument("--paths", default=",".join(PATHS))
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    found = swept([one for one in given.only.split(",") if one], given.to.split(","), given.paths.split(","), log=True)
    kinds: dict[str, int] = {}
    for one in found.problems:
        kinds[one.kind] = kinds.get(one.kind, 0) + 1
    print(
        f"{found.swept} files written or refused; {len(found.refused)} refused with a fix; problems: {kinds or 'none'}"
    )
    if given.out:
        rows = {"swept": found.swept, "problems": found.problems, "refused": found.refused}
        Path(given.out).write_text(json.dumps(rows, indent=1, default=lambda one: one._asdict()))


if __name__ == "__main__":
    main()
