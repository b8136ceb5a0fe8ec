"""Clusters that several cases share."""

from __future__ import annotations

from ..helpers import cluster

A100, B200, GB200 = cluster(8, "A100"), cluster(8, "B200"), cluster(8, "GB200")
ONE, TWELVE, MANY = cluster(1), cluster(12), cluster(64)
