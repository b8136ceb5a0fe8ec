"""Whether a dataset has no images, so that a vision-language model is trained on text alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from meshwright import file_access, json_text

INSTRUCTION_SETS = ("squad", "tulu3", "openmathinstruct2", "openmathinstruct2-thinking", "gsm8k")
TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".jsonl.gz")
IMAGE_KEYS = re.compile(rb'"(?:images?|image_url|pixel_values)"|<image>|<\|image')
IMAGE_COLUMNS = re.compile(rb"\bimages?\b|image_url|pixel_values", re.IGNORECASE)
MOST_BYTES = 2**28  # a larger file is not read for an answer that should be instant
MOST_FILES = 1000


def without_images(names: Iterable[str]) -> bool:
    """Return whether all these datasets are known to have no images: text sets, and files without an image column."""
    found = [name in INSTRUCTION_SETS or _local_text(name) for name in names]
    return bool(found) and all(found)


def _local_text(name: str) -> bool:
    path = Path(name).expanduser()
    if file_access.closed() or not name:
        return False
    try:
        files = sorted(_files(path))
        return bool(files) and all(_text_only(str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in files)
    except OSError:  # train says that it cannot be read
        return False


def _files(path: Path) -> Iterator[Path]:
    """Yield the files of a dataset; nothing if one of them is not known to be text."""
    if path.is_file():
        yield path
        return
    found = [one for one in path.rglob("*") if one.is_file() and not one.name.startswith(".")] if path.is_dir() else []
    if len(found) <= MOST_FILES:
        yield from found


@lru_cache(maxsize=1024)
def _text_only(path: str, size: int, changed: int) -> bool:
    """Return whether a file has no image column and no image in a message; False if that is not known."""
    del changed  # part of the cache key
    file, name = Path(path), path.lower()
    if name.endswith(".parquet"):
        return not IMAGE_COLUMNS.search(_parquet_schema(file))
    if name.endswith(".arrow"):
        return True  # of a saved dataset, whose columns are in its dataset_info.json
    if not name.endswith(TEXT_SUFFIXES) or size > MOST_BYTES:
        return False
    if name.endswith(".txt"):
        return True
    import gzip  # here, not above: plans of catalogue models do not need it, and it takes milliseconds

    raw = b""
    with suppress(EOFError, gzip.BadGzipFile):
        raw = gzip.decompress(file.read_bytes()) if name.endswith(".gz") else file.read_bytes()
    if name.endswith((".csv", ".tsv")):
        return not IMAGE_COLUMNS.search(raw.split(b"\n", 1)[0])
    if file.name == "dataset_info.json":
        with suppress(ValueError):
            return not IMAGE_COLUMNS.search(json.dumps(json_text.loads(raw).get("features")).encode())
    return bool(raw) and not IMAGE_KEYS.search(raw)


def _parquet_schema(file: Path) -> bytes:
    """Return the footer of a Parquet file, which has the names of its columns."""
    with file.open("rb") as stream:
        stream.seek(0, 2)
        end = stream.tell()
        stream.seek(max(end - 8, 0))
        length = int.from_bytes(stream.read(4), "little")
        if stream.read(4) != b"PAR1" or length > end:
            return b"image"  # not Parquet: nothing is known about it
        stream.seek(end - 8 - length)
        return stream.read(length)
