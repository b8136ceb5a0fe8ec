"""Throughput runs, one file per family."""
