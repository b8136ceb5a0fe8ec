"""DeepSpeed."""

from __future__ import annotations

from meshwright.dialects.deepspeed.keys import closed, known
from meshwright.dialects.deepspeed.parse import complete, parse, recognises
from meshwright.dialects.deepspeed.rules import RULES
from meshwright.dialects.deepspeed.spelling import spell
from meshwright.dialects.dialect import Dialect

DIALECT = Dialect(
    name="deepspeed",
    title="DeepSpeed",
    version="0.19.8",
    engine="deepspeed",
    forms=(
        "JSON files (ds_config.json)",
        "the commands `deepspeed … train.py --deepspeed FILE.json` and `--deepspeed_config FILE.json`",
    ),
    recognises=recognises,
    parse=parse,
    spell=spell,
    rules=RULES,
    complete=complete,
    closed=closed,
    known=known,
)
