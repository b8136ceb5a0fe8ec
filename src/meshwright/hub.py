"""The Hugging Face hub: its local cache, and the config.json of a model that is named by its id.

Only config.json is ever downloaded, as text that is parsed as plain JSON; code of a repository is never run.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

from meshwright import file_access
from meshwright.errors import InputError, first_line
from meshwright.notes import note
from meshwright.stages import stage

Result = TypeVar("Result")

CONFIG = "config.json"
OFFLINE = "HF_HUB_OFFLINE"
CONNECT_S = 3.0  # an unreachable hub would otherwise be retried for half a minute
DOWNLOAD_S = 20.0  # of a file of a few kilobytes
RETRY_S = 60.0  # before an id that was not found is looked up again; one answer names its model many times
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FILE_SUFFIXES = (
    *(".json", ".jsonl", ".ndjson", ".toml", ".yaml", ".yml", ".sh", ".bash", ".slurm", ".sbatch", ".py", ".ipynb"),
    *(".txt", ".log", ".csv", ".tsv", ".parquet", ".md", ".gz", ".zst", ".bin", ".idx", ".pt", ".pth", ".safetensors"),
)
_failures: dict[str, tuple[float, NotFoundError]] = {}


class NotFoundError(InputError):
    """A hub model whose config.json is neither cached nor downloaded."""


def _not_found(model_id: str, reason: str, *fix: str) -> NotFoundError:
    searched = f"it is not in the hub cache {hub_cache()} and was not downloaded: {reason}"
    return NotFoundError(searched, "model", model_id, fix)


def hub_cache() -> Path:
    """Return the hub cache folder, from huggingface_hub's environment variables."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named or Path(home) / "hub").expanduser()


def base_name(folder: str) -> str:
    """Return the name of a model folder for others: the id of a download, else its path."""
    path = Path(folder).expanduser()
    if hub_cache() not in path.parents:
        return folder
    name = path.relative_to(hub_cache()).parts[0]
    return name.removeprefix("models--").replace("--", "/", 1) if name.startswith("models--") else folder


def tokenizer_download(model_id: str) -> str:
    """Return the command that downloads a model's tokenizer and chat template."""
    return f"hf download {model_id} --include '*token*' --include '*.jinja'"


def is_cached(model_id: str) -> bool:
    """Return whether a model or tokenizer of this id was downloaded."""
    return _cached_folder(model_id).is_dir()


def cached_snapshot(model_id: str, contains: str = CONFIG) -> Path | None:
    """Return the newest downloaded snapshot of a hub model that contains a file."""
    model = _cached_folder(model_id)
    snapshots = model / "snapshots"
    main_ref = model / "refs" / "main"
    candidates = [snapshots / main_ref.read_text().strip()] if main_ref.is_file() else []
    if not any(one.is_dir() for one in candidates) and snapshots.is_dir():
        candidates = sorted((one for one in snapshots.iterdir() if one.is_dir()), key=lambda one: one.stat().st_mtime)
    return next((one for one in reversed(candidates) if (one / contains).is_file()), None)


def _cached_folder(model_id: str) -> Path:
    return hub_cache() / f"models--{model_id.replace('/', '--')}"


def is_model_id(text: str) -> bool:
    """Return whether a text has the form of a hub id, ORG/NAME, and is not the name of a file."""
    is_id = _ID.fullmatch(text) is not None and "--" not in text and ".." not in text
    return is_id and not text.lower().endswith(_FILE_SUFFIXES)


def text_name(model_id: str) -> str:
    """Return the name under which a server sends the config.json of a hub model with a request."""
    return f"hub/{model_id}/{CONFIG}"


def cached_config(model_id: str) -> Path | None:
    """Return the config.json of a hub model in the local cache, or sent with the request; None if it is not there."""
    if not is_model_id(model_id):
        return None
    if file_access.closed():
        sent = text_name(model_id)
        return Path(sent) if file_access.exists(sent) else None
    try:
        folder = cached_snapshot(model_id)
    except (OSError, ValueError):  # a folder that cannot be read, or a damaged reference
        return None
    return None if folder is None else folder / CONFIG


def config_of(model_id: str) -> Path:
    """Return the config.json of a hub model: cached, else downloaded; raise InputError with the reason if neither."""
    found = cached_config(model_id)
    if found is not None:
        return found
    at, known = _failures.get(model_id, (0.0, None))
    if known is not None and time.monotonic() - at < RETRY_S:
        raise known
    try:
        return _download(model_id)
    except NotFoundError as error:
        _failures[model_id] = (time.monotonic(), error)
        raise


def _download(model_id: str) -> Path:
    """Return the downloaded config.json, which is then in the cache; raise NotFoundError with the reason."""
    elsewhere = f"hf download {model_id} {CONFIG} on a machine with internet, then give the file's path"
    if is_offline():
        raise _not_found(model_id, f"{OFFLINE} is set (--offline sets it)", f"unset {OFFLINE}", elsewhere)
    stage(f"the hub is asked for {CONFIG} of {model_id}")
    if not hub_reachable():
        raise _not_found(model_id, f"{_address().hostname} cannot be reached", elsewhere)
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError
    except ImportError:
        install = "pip install huggingface_hub"
        raise _not_found(model_id, "huggingface_hub is not installed", install, elsewhere) from None
    try:
        found = within(DOWNLOAD_S, lambda: hf_hub_download(model_id, CONFIG, etag_timeout=CONNECT_S))
    except GatedRepoError:
        where = f"{_address().geturl()}/{model_id}"
        raise _not_found(model_id, f"its license must be accepted at {where}", "hf auth login") from None
    except RepositoryNotFoundError:
        raise _not_found(model_id, "the hub has no such model, or it is private", "hf auth login") from None
    except EntryNotFoundError:
        raise _not_found(model_id, f"its repository has no {CONFIG}") from None
    except Exception as error:  # whatever the network or the library raises is the reason
        raise _not_found(model_id, first_line(error), elsewhere) from None
    if found is None:
        raise _not_found(model_id, f"the hub did not answer within {DOWNLOAD_S:.0f} s", elsewhere)
    note(f"{model_id}: {CONFIG} was downloaded from the hub ({OFFLINE}=1 or --offline prevents downloads)")
    return Path(found)


_shipped_only: ContextVar[bool] = ContextVar("shipped_only", default=False)


@contextmanager
def no_downloads() -> Iterator[None]:
    """Ask the hub for nothing inside: data that we ship must not need it."""
    before = _shipped_only.set(True)
    try:
        yield
    finally:
        _shipped_only.reset(before)


def is_offline() -> bool:
    """Return whether downloads are switched off."""
    return _shipped_only.get() or os.environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")


def go_offline() -> None:
    """Switch downloads off in this process and those that it starts."""
    os.environ[OFFLINE] = "1"


def hub_reachable() -> bool:
    """Return whether the hub is enabled and reachable."""
    return not is_offline() and bool(within(CONNECT_S, _connects))


def _address() -> SplitResult:
    return urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")


def _connects() -> bool:
    import socket  # here, not above: plans of catalogue models do not need it, and it takes milliseconds

    address = _address()
    host, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    if proxy:
        proxy_address = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        host, port = proxy_address.hostname or host, proxy_address.port or port
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S):
            return True
    except OSError:
        return False


def within(seconds: float, call: Callable[[], Result]) -> Result | None:
    """Return what a call returns; None if it takes longer. Name resolution has no time limit of its own."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised in the calling thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return results[0] if results else None
