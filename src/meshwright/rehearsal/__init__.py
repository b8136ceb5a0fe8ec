"""Rehearsal: the engine's step of every kind of rank on one GPU, with a simulated network."""
