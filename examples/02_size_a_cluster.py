"""How many GPUs a training needs, how long it takes and what it costs."""

from meshwright import api

sizing = api.size("llama3-70b", "pretrain", "H100", tokens="15T", price=3.0)
for label, size in (("smallest", sizing.smallest), ("most efficient", sizing.most_efficient)):
    if size is None:
        print(f"{label}: no size fits")
        continue
    print(f"{label}: {size.gpus} GPUs, {size.days:,.0f} days, ${size.cost:,.0f}")
