"""Plan a training: find a recipe, size it to the cluster, search layouts and explain the result.

What ranks layouts and sizes clusters is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.lazy_names import LazyNames
from meshwright.planner.baseline import baseline_for, case_of, moved_to, with_engine_strategy, with_listed_stages
from meshwright.planner.batch_rate import scaled_lr
from meshwright.planner.budget import Budget, Price, budget, step_tokens
from meshwright.planner.explain import reasons
from meshwright.planner.faster_step import TITLE as FASTER_STEP
from meshwright.planner.fewer_nodes import TITLES as FEWER_NODES
from meshwright.planner.fewer_nodes import node_note
from meshwright.planner.findings import FOR_MEMORY, examine, held_in_a_search, with_cost
from meshwright.planner.levers import options_for_recipe
from meshwright.planner.micro_batch import with_fastest_micro_batch
from meshwright.planner.missing_fixes import explain_missing, layout_fix
from meshwright.planner.plan import (
    OPEN_LENGTH,
    Change,
    Contradiction,
    Option,
    Plan,
    PublishedLayout,
    Question,
    Reason,
    Repair,
    Suggestion,
    calibration_notes,
)
from meshwright.planner.printed_commands import command_for_model, command_for_target, is_override
from meshwright.planner.recommend import (
    fits_without_offload,
    plan_fixed,
    plan_without_advice,
    recommend,
    replanned,
    with_replanned,
)
from meshwright.planner.repair import contradiction, error_messages, find_repair, find_repair_of_file, much_faster_step
from meshwright.planner.scaling import batch_for_tokens, fitting_batch, scaled_batch
from meshwright.planner.search import Candidate, as_overrides
from meshwright.planner.storage import Storage

if TYPE_CHECKING:  # the names of the table below, for type checkers
    from meshwright.planner.ranking import Dropped, Ranking, rank_layouts
    from meshwright.planner.reliability import Reliability
    from meshwright.planner.sizing import Compared, Size, Sizing, compare, size
    from meshwright.planner.smallest_cluster import smallest_fit

__getattr__ = LazyNames(
    __name__,
    {
        "planner.ranking": "Dropped Ranking rank_layouts",
        "planner.reliability": "Reliability",
        "planner.sizing": "Compared Size Sizing compare size",
        "planner.smallest_cluster": "smallest_fit",
    },
)
__all__ = [
    "FASTER_STEP",
    "FEWER_NODES",
    "FOR_MEMORY",
    "OPEN_LENGTH",
    "Budget",
    "Candidate",
    "Change",
    "Compared",
    "Contradiction",
    "Dropped",
    "Option",
    "Plan",
    "Price",
    "PublishedLayout",
    "Question",
    "Ranking",
    "Reason",
    "Reliability",
    "Repair",
    "Size",
    "Sizing",
    "Storage",
    "Suggestion",
    "as_overrides",
    "baseline_for",
    "batch_for_tokens",
    "budget",
    "calibration_notes",
    "case_of",
    "command_for_model",
    "command_for_target",
    "compare",
    "contradiction",
    "error_messages",
    "examine",
    "explain_missing",
    "find_repair",
    "find_repair_of_file",
    "fits_without_offload",
    "fitting_batch",
    "held_in_a_search",
    "is_override",
    "layout_fix",
    "moved_to",
    "much_faster_step",
    "node_note",
    "options_for_recipe",
    "plan_fixed",
    "plan_without_advice",
    "rank_layouts",
    "reasons",
    "recommend",
    "replanned",
    "scaled_batch",
    "scaled_lr",
    "size",
    "smallest_fit",
    "step_tokens",
    "with_cost",
    "with_engine_strategy",
    "with_fastest_micro_batch",
    "with_listed_stages",
    "with_replanned",
]
