"""Silences output of other libraries that users cannot act on."""

from __future__ import annotations

import logging as python_logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_progress() -> Iterator[None]:
    """Disable transformers' progress bars inside this block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers'
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # transformers'


def no_needless_warnings() -> None:
    """Drop torchao's warnings about enums and kernels, and torch's about a CPU without bf16 and compiled recompute.

    Every import of transformers triggers the first; the engine says the last in one line with the fix.
    """
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    python_logging.getLogger("torch.utils._pytree").addFilter(_not_about_enums)
    python_logging.getLogger("torchao").addFilter(_not_about_kernels)
    python_logging.getLogger("torch._higher_order_ops.wrap").addFilter(_not_about_recompute)


def _not_about_enums(record: python_logging.LogRecord) -> bool:
    return "is an Enum subclass" not in str(record.msg)


def _not_about_kernels(record: python_logging.LogRecord) -> bool:
    """Drop torchao's warning about its prebuilt kernels: no part of the engine calls them."""
    return not str(record.msg).startswith("Failed to load")


def _not_about_recompute(record: python_logging.LogRecord) -> bool:
    """Drop the warning that compiled recompute must not contain in-place operations: the engine makes none."""
    return "context_fn is passed" not in str(record.msg)
