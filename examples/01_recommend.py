"""Recommend a plan and read its numbers."""

from meshwright import recommend

plan = recommend("llama3-8b", "8xH100", "sft")
memory, capacity = plan.estimate.memory.total, plan.question.cluster.gpu.memory_gib
print(f"{plan.recipe.name}: {memory:.1f} of {capacity:.1f} GiB, {plan.estimate.step_s:.2f} s per step")
for change in plan.changes:
    print(f"  {change.field}: {change.old} -> {change.new}")
