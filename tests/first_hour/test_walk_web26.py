"""What a person sees of the site, of progress in a pipe and of hostile files."""

from __future__ import annotations

import pytest

from meshwright.display import two_digits


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0024, "0.0024"), (1.64, "1.6"), (99.4, "99"), (99.6, "100"), (164.0, "164"), (15e3, "15,000")],
)
def test_figures_of_messages_have_no_exponent(value: float, text: str) -> None:
    assert two_digits(value) == text
