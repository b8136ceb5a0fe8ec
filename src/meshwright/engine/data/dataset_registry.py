"""Where a data set's name leads: a path, a folder of named sets, the local Hugging Face cache or the hub."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from meshwright.engine.data.files import FIELD, Rows, find_rows, need
from meshwright.errors import InputError, closest, first_line

REACH_S = 3.0  # seconds in which the hub must answer to be asked at all


@dataclass(frozen=True)
class Named:
    """A data set known by a short name."""

    hub_id: str
    config: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    held_out: str = ""  # the split that is evaluated on where the recipe names none


TULU = Named("allenai/tulu-3-sft-mixture", columns={"messages": "messages"})
SQUAD = Named(
    "rajpurkar/squad",
    columns={"context": "context", "prompt": "question", "response": "answers"},
    held_out="validation",
)
OPEN_MATH = Named("nvidia/OpenMathInstruct-2", columns={"prompt": "problem", "response": "generated_solution"})
NAMED: dict[str, Named] = {
    "squad": SQUAD,
    "llm-finetune": SQUAD,
    "tulu3": TULU,
    "openmathinstruct2": OPEN_MATH,
    "openmathinstruct2-thinking": OPEN_MATH,
    "gsm8k": Named("openai/gsm8k", "main", {"prompt": "question", "response": "answer"}, "test"),
    "cord-v2": Named("naver-clova-ix/cord-v2", held_out="validation"),
    "medpix": Named("mmoukouba/MedPix-VQA", columns={"images": "image_id", "prompt": "question", "response": "answer"}),
    "rdr": Named("quintend/rdr-items"),
    "wikitext": Named("Salesforce/wikitext", "wikitext-103-raw-v1", {"text": "text"}, "validation"),
}


def open_rows(name: str, split: str, streaming: bool = False) -> Rows:
    """The rows of a data set by path, short name or hub id."""
    path = Path(name).expanduser()
    if path.exists():
        return find_rows(path, split, name)
    if path.is_absolute() or name.startswith((".", "~")):
        raise InputError("there is no such file or folder", field=FIELD, value=name)
    known = NAMED.get(name)
    if known is None and "/" not in name:
        known = Named("")
    named = known or Named(name)
    folder = _beside(name)
    if folder is not None:
        return find_rows(_of_config(folder, named), split, name)
    if not named.hub_id:
        raise _nowhere(name, "")
    return _from_hub(name, named, split, streaming)


def _of_config(folder: Path, named: Named) -> Path:
    """Hub repositories with several configurations keep each in a folder of its own."""
    inner = folder / named.config
    return inner if named.config and inner.is_dir() else folder


def columns_of(name: str, given: dict[str, str]) -> dict[str, str]:
    """The columns a recipe names, or those of a set known by name."""
    return given or (NAMED[name].columns if name in NAMED else {})


def _beside(name: str) -> Path | None:
    """The folder or file of that name in $MESHWRIGHT_DATA."""
    root = os.environ.get("MESHWRIGHT_DATA", "")
    if not root:
        return None
    short = name.rsplit("/", 1)[-1]
    for candidate in (short, f"{short}.jsonl", f"{short}.parquet"):
        path = Path(root).expanduser() / candidate
        if path.exists():
            return path
    return None


def _from_hub(name: str, named: Named, split: str, streaming: bool) -> Rows:
    datasets = need("datasets")
    reachable = hub_reachable()
    try:
        if reachable:
            found = datasets.load_dataset(named.hub_id, named.config or None, split=split, streaming=streaming)
            return Rows(name, saved=found)
        return _from_cache(name, named, split)
    except Exception as error:  # offline, gated, unknown, torn: the user is told where was looked and what to do
        why = first_line(error) if reachable else "does not answer or may not be asked"
        raise _nowhere(name, named.hub_id, why) from None


def _from_cache(name: str, named: Named, split: str) -> Rows:
    """A data set that was prepared or downloaded before, without asking the hub (whose retries take half a minute)."""
    from huggingface_hub import snapshot_download

    cached = need("datasets.packaged_modules.cache.cache")
    told = {"dataset_name": named.hub_id.rpartition("/")[2], "repo_id": named.hub_id, "version": "auto", "hash": "auto"}
    try:
        prepared = cached.Cache(config_name=named.config or None, **told)
        return Rows(name, saved=prepared.as_dataset(split=split))
    except ValueError:  # never prepared; its files may be there nevertheless
        folder = snapshot_download(named.hub_id, repo_type="dataset", local_files_only=True)
    return find_rows(_of_config(Path(folder), named), split, name)


def hub_reachable() -> bool:
    """Whether the hub may be asked and answers at all."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    address = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    host, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    if proxy:
        through = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        host, port = through.hostname or host, through.port or port
    try:
        with socket.create_connection((host, port), timeout=REACH_S):
            return True
    except OSError:
        return False


def _nowhere(name: str, hub_id: str, why: str = "") -> InputError:
    root = os.environ.get("MESHWRIGHT_DATA", "")
    looked = [f"the path {name}", f"{root}/{name}" if root else "$MESHWRIGHT_DATA (not set)"]
    fix = [f"{FIELD}=FILE or FOLDER of JSONL, JSON, CSV or Parquet", "--dataset mock"]
    hint = ""
    if hub_id:
        looked += ["the local Hugging Face cache", f"the hub as {hub_id}: {why}"]
        fix.insert(
            0, f"hf download {hub_id} --repo-type dataset --local-dir {root or 'FOLDER'}/{name.rsplit('/', 1)[-1]}"
        )
        if not root:
            fix.insert(1, "export MESHWRIGHT_DATA=FOLDER")
    elif near := closest(name, NAMED):
        hint = f", did you mean {' or '.join(near)}?"
        fix = [f"{FIELD}={one}" for one in near] + fix
    reason = f"no such data set{hint} (looked at {'; '.join(looked)})"
    return InputError(reason, field=FIELD, value=name, fix=tuple(fix))
