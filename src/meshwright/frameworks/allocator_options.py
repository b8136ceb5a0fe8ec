"""The options of torch's GPU memory allocator, in PYTORCH_CUDA_ALLOC_CONF: which ones torch refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshwright.similar import misspelled

OPTION = re.compile(r"\s*(\w+)\s*:\s*(\[[^\]]*\]|[^\s:=,\[\]]+)\s*")
EXAMPLE = "options are KEY:VALUE, such as expandable_segments:True"
LEAST_MB = 20  # torch's large blocks
SWITCH = "True or False"
VALUES: Mapping[str, tuple[str, str]] = {
    "expandable_segments": (r"True|False", SWITCH),
    "max_split_size_mb": (r"[2-9]\d|\d{3,}", f"{LEAST_MB} or more"),
    "max_non_split_rounding_mb": (r"[2-9]\d|\d{3,}", f"{LEAST_MB} or more"),
    "garbage_collection_threshold": (r"0?\.\d*[1-9]\d*", "a share between 0 and 1"),
    "roundup_power2_divisions": (r"\[.*\]|1|2|4|8|16|32|64", "a power of two, or a list"),
    "backend": (r"native|cudaMallocAsync", "native or cudaMallocAsync"),
    "release_lock_on_cudamalloc": (r"True|False", SWITCH),
    "pinned_use_cuda_host_register": (r"True|False", SWITCH),
    "pinned_use_background_threads": (r"True|False", SWITCH),
    "pinned_num_register_threads": (r"\d+", "a number"),
    "graph_capture_record_stream_reuse": (r"True|False", SWITCH),
}
"""By option: the values that torch takes, as a pattern and in words."""


def _options(value: str) -> list[str]:
    return [one for one in re.split(r",(?![^\[]*\])", value) if one.strip()]


def invalid_option(value: str) -> str:
    """Return what torch refuses in the options of its allocator; empty if nothing is known to be wrong.

    A name that is not known here may be of another release, unless it is nearly a known one.
    """
    for one in _options(value):
        found = OPTION.fullmatch(one)
        if found is None:
            return EXAMPLE
        name, stated = found.groups()
        pattern, words = VALUES.get(name, ("", ""))
        if not pattern and (meant := misspelled(name, VALUES)):
            return f"it has no option {name}; did you mean {meant[0]}?"
        if pattern and not re.fullmatch(pattern, stated):
            return f"{name} is {words}, not {stated}"
    return ""


def corrected_options(value: str) -> str:
    """Return the options as they were meant, without those that have no valid value."""
    texts = (one.replace("=", ":").strip() for one in _options(value))
    return ",".join(fixed for text in texts if (fixed := _corrected(text)) and not invalid_option(fixed))


def _corrected(text: str) -> str:
    name, colon, stated = (part.strip() for part in text.partition(":"))
    known = name if name in VALUES else next(iter(misspelled(name, VALUES)), name)
    is_switch = VALUES.get(known, ("", ""))[1] == SWITCH
    return f"{known}{colon}{stated.title() if is_switch else stated}"
