"""What is wrong with a run: evidence, and what to try, cheapest first."""

from pathlib import Path

from meshwright import api

log = Path(__file__).parent / "logs" / "torchtitan_slow.log"
checkup = api.diagnose(str(log), recipe="llama3-8b", gpus="8xH100")
for finding in checkup.findings:
    print(f"{finding.severity}: {finding.message}")
