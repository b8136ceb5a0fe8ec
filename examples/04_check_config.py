"""Check another framework's launch script before it queues. Nothing in it is executed."""

from pathlib import Path

from meshwright import check

script = Path(__file__).parent / "configs" / "train_llama3.sh"
result = check(str(script), gpus="8xH100")
for finding in result.findings:
    print(f"{finding.severity} line {finding.line}: {finding.message}")
    for fix in finding.fix:
        print(f"    fix: {fix}")
