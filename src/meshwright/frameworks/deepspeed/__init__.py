"""DeepSpeed: JSON configs and the commands that reference one."""
