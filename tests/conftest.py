"""Settings that must stand before torch is imported."""

import os

# Ranks are forked after torch is imported; a parent that started OpenMP threads would leave them deadlocked.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
