"""Without what other libraries say that no user can act on."""

from __future__ import annotations

import logging as python_logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_progress() -> Iterator[None]:
    """No bars inside this block; afterwards as before."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers'
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # transformers'


def no_enum_warnings() -> None:
    """Without torch's warning of how torchao registers its enums: every import of transformers brings it up."""
    python_logging.getLogger("torch.utils._pytree").addFilter(_not_about_enums)


def _not_about_enums(record: python_logging.LogRecord) -> bool:
    return "is an Enum subclass" not in str(record.msg)
