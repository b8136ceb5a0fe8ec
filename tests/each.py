"""One test of many small cases: as a test of its own, each would take longer to set up than to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Call the test for every case, in place of pytest's parametrize; a failure names its case."""
    listed = list(cases)
    assert listed

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        def of_every_case() -> None:
            for case in listed:
                given = {names: case} if isinstance(names, str) else dict(zip(names, case, strict=True))
                try:
                    test(**given)
                except (Exception, pytest.fail.Exception) as error:
                    raise AssertionError(f"{getattr(case, 'name', case)}: {error}") from error

        of_every_case.__name__, of_every_case.__doc__ = test.__name__, test.__doc__
        of_every_case.__module__, of_every_case.__qualname__ = test.__module__, test.__qualname__
        return of_every_case

    return decorate
