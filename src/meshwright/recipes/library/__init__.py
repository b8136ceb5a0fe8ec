"""Recipes for real training, one file per family."""
