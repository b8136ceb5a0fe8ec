"""Loads tokenizers from a local folder or the local Hugging Face cache; never downloads, never runs remote code."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.engine.data import byte_level
from meshwright.errors import InputError, first_line
from meshwright.file_access import missing_path, neighbours
from meshwright.hub import cached_snapshot, tokenizer_download
from meshwright.models.catalogue import find, is_path
from meshwright.notes import note
from meshwright.recipes.types import RANDOM_WEIGHTS, Recipe

FIELD = "data.tokenizer"
BYTES = f"{FIELD}={byte_level.NAME}, for a model that starts from random weights"
END = "<|endoftext|>"


def load_tokenizer(source: Recipe | str | Path, pretrained: Path | None = None) -> Any:
    """Load the tokenizer of a recipe (its own, the pretrained weights' or the model's), a folder or a cached hub id."""
    name = tokenizer_name(source, pretrained) if isinstance(source, Recipe) else str(source)
    if name is None:
        assert isinstance(source, Recipe)
        reason = f"{source.data.dataset} is text, but no tokenizer is set"
        raise InputError(reason, field=FIELD, value="", fix=(BYTES, *_folder_fix(), "--dataset mock"))
    if name == byte_level.NAME:
        name = str(byte_level.cached_byte_tokenizer())
    path = Path(name).expanduser()
    if path.is_file():
        path = path.parent
    if path.is_dir():
        files = byte_pair_files(path)
        if files is None:
            return _load(str(path), name, cached=False)
        with suppress(InputError):  # the files of a model whose own class reads them
            if (path / "config.json").is_file():
                return _load(str(path), name, cached=False)
        return _from_byte_pairs(path, *files)
    if path.is_absolute() or name.startswith((".", "~")) or name.endswith("/") or name.count("/") > 1:
        raise missing_path(name, FIELD, "no such folder")
    return _load(name, name, cached=True)


def highest_id(tokenizer: Any) -> int:
    """Return the highest token id of a tokenizer; -1 if it has none."""
    return int(max(tokenizer.get_vocab().values(), default=-1))


def check_ids(tokenizer: Any, vocab: int, field: str = FIELD) -> None:
    """Raise if the tokenizer has ids without an embedding in the model."""
    highest = highest_id(tokenizer)
    if highest >= vocab:
        raise InputError(
            f"the tokenizer has ids up to {highest}, but the model's vocabulary has {vocab} tokens (0 to {vocab - 1})",
            field=field,
            value=tokenizer.name_or_path,
            fix=("data.tokenizer=the model's tokenizer", f"architecture.vocab={highest + 1}"),
        )


def tokenizer_name(recipe: Recipe, pretrained: Path | None = None) -> str | None:
    """Return the folder or hub id of a recipe's tokenizer; None if nothing names one."""
    if recipe.data.tokenizer:
        return recipe.data.tokenizer
    if pretrained is not None:
        return str(pretrained)
    named = recipe.checkpoint.pretrained
    if named and named != RANDOM_WEIGHTS:
        return named
    return recipe.model if is_path(recipe.model) else find(recipe.model).hf_id or None


def local_folder(name: str) -> Path | None:
    """Return the folder of a tokenizer that is named by a path or a hub id; None if it is not on this machine."""
    if name == byte_level.NAME:
        return byte_level.cached_byte_tokenizer()
    path = Path(name).expanduser()
    if path.exists():
        return path if path.is_dir() else path.parent
    return cached_snapshot(name, "tokenizer_config.json")


def _folder_fix() -> tuple[str, ...]:
    return ("data.tokenizer=FOLDER with tokenizer.json and tokenizer_config.json, or vocab.json and merges.txt",)


def byte_pair_files(folder: Path) -> tuple[Path, Path] | None:
    """Return vocab.json and merges.txt (or with a prefix: gpt2-vocab.json) of a folder without a tokenizer file."""
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    found = [sorted(folder.glob(pattern)) for pattern in ("*vocab.json", "*merges.txt")]
    return (found[0][0], found[1][0]) if all(len(files) == 1 for files in found) else None


def _from_byte_pairs(folder: Path, vocab: Path, merges: Path) -> Any:
    """Load GPT-2's kind of tokenizer, byte-level BPE, from its two files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    try:
        known = json.loads(vocab.read_bytes())
        if not isinstance(known, dict) or not all(isinstance(one, int) for one in known.values()):
            raise ValueError(f"{vocab.name} must map tokens to integers")
        special = {name: END for name in ("bos_token", "eos_token", "unk_token") if END in known}
        lines = merges.read_text(encoding="utf-8").splitlines()
        pairs: Any = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        backend = Tokenizer(models.BPE(vocab=known, merges=pairs))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        loaded: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **special)  # type: ignore[no-untyped-call]
    except Exception as error:  # as for other tokenizers
        raise _load_error(str(folder), False, error) from None
    if len(loaded) != len(known):
        reason = f"{vocab.name} has {len(known):,} tokens, of which {len(loaded):,} were read"
        raise InputError(reason, field=FIELD, value=str(folder), fix=_folder_fix())
    note(
        f"{folder}: {vocab.name} and {merges.name} are read as byte-level BPE (GPT-2's), end of text {loaded.eos_token}"
    )
    return loaded


def _load(source: str, name: str, cached: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise InputError(f"the tokenizer needs another package: {first_line(error)}", field=FIELD, value=name) from None
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and others for the same mistakes
        raise _load_error(name, cached, error) from None
    # Of a model folder without tokenizer files, transformers makes a tokenizer without a vocabulary.
    if not loaded.encode("a", add_special_tokens=False):
        raise InputError("no tokenizer in this folder", field=FIELD, value=name, fix=(*_folder_fix(), BYTES))
    return loaded


def _load_error(name: str, cached: bool, error: Exception) -> InputError:
    if "trust_remote_code" in str(error):
        reason = "the tokenizer needs remote code, which is never run"
        return InputError(reason, field=FIELD, value=name, fix=_folder_fix())
    if cached:
        near = neighbours(Path(name))
        reason = f"not a folder{f' (did you mean {near[0]}?)' if near else ''} and not in the local Hugging Face cache"
        fix = (*near[:1], tokenizer_download(name), *_folder_fix())
        return InputError(reason, field=FIELD, value=name, fix=fix)
    reason = "no tokenizer in this folder" if "backend tokenizer" in str(error) else f"cannot read: {first_line(error)}"
    return InputError(reason, field=FIELD, value=name, fix=(*_folder_fix(), BYTES))


ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>", "<|eot_id|>")
"""Tokens that end a text, of which a tokenizer's vocabulary may have one."""


def eos_fix(folder: str) -> str:
    """Return how a tokenizer gets an eos_token: in its tokenizer_config.json, which a bare tokenizer.json lacks."""
    settings, vocabulary = Path(folder) / "tokenizer_config.json", Path(folder) / "tokenizer.json"
    if settings.exists() or not vocabulary.is_file():
        return "set eos_token in its tokenizer_config.json"
    text = vocabulary.read_text("utf-8", errors="replace")
    token = next((one for one in ENDS if f'"{one}"' in text), "TOKEN")
    config = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": token})
    return f"echo {shlex.quote(config)} > {shlex.quote(str(settings))}"
