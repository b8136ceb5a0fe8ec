"""Launch commands and job scripts, their submission and watching (build_job.py turns a request into a job)."""

from meshwright.launch.plan_commands import (
    command_of,
    commands_of,
    left_out,
    lost_number,
    other_speeds,
    start_script,
    unavailable_engine,
)

__all__ = ["command_of", "commands_of", "left_out", "lost_number", "other_speeds", "start_script", "unavailable_engine"]
