"""Fingerprints of datasets and initial weights: whether a resumed run reads what its checkpoints were trained on.

A fingerprint has the sizes of all files and a hash of samples of their contents, in the order in which they are read.
Names and times are not part of it: a folder may be copied or moved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshwright.engine.data.corpus_reader import find_text_files
from meshwright.engine.data.dataset_registry import open_rows
from meshwright.engine.data.files import longest_suffix
from meshwright.engine.data.megatron_files import megatron_prefix
from meshwright.engine.data.open_dataset import MOCK_NAMES
from meshwright.engine.data.shards import MANIFEST, is_shard_folder
from meshwright.recipes.types import Recipe

GENERATED = (*MOCK_NAMES, "vlm-mock", "diffusion-mock")
FULL_BYTES = 16 << 20  # a dataset up to this size is hashed completely
SAMPLED_BYTES = 8 << 20  # of a larger one, spread over its files
PIECES = 16  # per file
LEAST_PIECE = 4096
LINE_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".txt")
WEIGHTS = "the initial weights"  # their name among the fingerprints


class Fingerprint(msgspec.Struct, frozen=True):
    """Size and sampled content of files."""

    files: int
    bytes: int
    hash: str
    lines: int | None = None  # of small text files

    def __str__(self) -> str:
        lines = f"{self.lines:,} lines, " if self.lines is not None else ""
        files = f" in {self.files:,} files" if self.files != 1 else ""
        return f"{lines}{self.bytes:,} bytes{files}, content {self.hash[:8]}"


def weights_fingerprint(folder: Path | None) -> dict[str, Fingerprint]:
    """Return the fingerprint of a folder's safetensors files; random weights have no files."""
    try:
        return {WEIGHTS: fingerprint(sorted(folder.rglob("*.safetensors")) if folder is not None else [])}
    except OSError:  # loading them reports it
        return {}


def data_fingerprints(recipe: Recipe) -> dict[str, Fingerprint]:
    """Return the fingerprints of a recipe's data files by name; generated and streamed datasets have none."""
    data = recipe.data
    names = [*(data.blend or (data.dataset,)), *data.anneal_blend, *filter(None, (data.validation, data.chat_template))]
    found = {name: _fingerprint(recipe, name) for name in dict.fromkeys(names) if name not in GENERATED}
    return {name: one for name, one in found.items() if one is not None}


def _fingerprint(recipe: Recipe, name: str) -> Fingerprint | None:
    try:
        files = _files(recipe, name)
        return fingerprint(files) if files else None
    except Exception:  # opening the dataset reports what is wrong with it; other ranks wait for this one
        return None


def _files(recipe: Recipe, name: str) -> Sequence[Path]:
    """Return the files of a dataset in the order in which they are read; none for a stream from the hub."""
    path = Path(name).expanduser()
    if name == recipe.data.chat_template:
        return [path] if path.is_file() else []
    prefix = megatron_prefix(path)
    if prefix is not None:
        return [Path(f"{prefix}{ending}") for ending in (".idx", ".bin")]
    if path.is_dir() and any(path.glob("*.safetensors")):
        return sorted(path.glob("*.safetensors"))
    if is_shard_folder(path):
        return [path / MANIFEST]  # it has the checksums of all shards
    if recipe.goal == "pretrain" and path.exists() and not recipe.data.images:
        return find_text_files([str(path)])
    rows = open_rows(name, recipe.data.split, recipe.data.streaming)
    cached: list[Mapping[str, Any]] = getattr(rows.dataset, "cache_files", [])
    return rows.files or [Path(one["filename"]) for one in cached]


def fingerprint(files: Sequence[Path]) -> Fingerprint:
    """Return the fingerprint of files, in milliseconds also for terabytes."""
    sizes = [path.stat().st_size for path in files]
    total = sum(sizes)
    digest = hashlib.blake2b(repr(sizes).encode(), digest_size=16)
    lines: int | None = 0
    chosen = range(len(files)) if total <= FULL_BYTES else _spread(len(files), SAMPLED_BYTES // LEAST_PIECE)
    for number in chosen:
        path, size = files[number], sizes[number]
        with path.open("rb") as file:
            if total <= FULL_BYTES:
                content = file.read()
                digest.update(content)
                counted = content.count(b"\n") + (bool(content) and not content.endswith(b"\n"))
                lines = lines + counted if lines is not None and longest_suffix(path, LINE_SUFFIXES) else None
                continue
            lines = None
            piece = max(SAMPLED_BYTES // (len(chosen) * PIECES), LEAST_PIECE)
            for start in _spread(max(size - piece, 0) + 1, max(SAMPLED_BYTES // (len(chosen) * piece), 1)):
                file.seek(start)
                digest.update(file.read(piece))
    return Fingerprint(len(files), total, digest.hexdigest(), lines)


def _spread(count: int, most: int) -> Sequence[int]:
    """Return at most `most` numbers below `count`, evenly spread, with the first and the last."""
    if count <= most:
        return range(count)
    return [round(i * (count - 1) / max(most - 1, 1)) for i in range(most)]
