"""Rules of our cluster. A rule also masks the candidates of a search, so its function must accept arrays."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import rule


@rule(
    "acme.batch-tokens",
    "error",
    "global_batch_size",
    message="{tokens:,} tokens per step; at most 8 Mi are approved",
    symptom="the run is rejected by the review board",
    cause="larger batches diverged in our 2026 runs",
    fixes=({"global_batch_size": lambda c: [8 * 1024**2 // int(c.seq_length)]},),
    values={"tokens": lambda c: int(c.global_batch_size * c.seq_length)},
)
def batch_is_approved(c: Case) -> Column:
    return c.global_batch_size * c.seq_length > 8 * 1024**2
