"""Samples by number, and the part of a step's samples that one rank works on."""
