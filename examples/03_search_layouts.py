"""Rank every legal layout, and see why the others were dropped."""

from meshwright import api

ranking = api.plan("llama3-8b", "16xH100", "pretrain", top=3)
for plan in ranking.plans:
    layout = plan.layout_dict()
    degrees = " ".join(f"{name} {layout[name]}" for name in ("tp", "pp", "cp", "dp_shard"))
    print(f"{plan.estimate.step_s:6.2f} s  {plan.estimate.memory.total:5.1f} GiB  {degrees}")
for dropped in ranking.dropped[:5]:
    print(f"{dropped.count:6,} dropped: {dropped.reason}")
