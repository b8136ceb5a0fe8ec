"""Checkpoints of a run: saved in one layout, loaded in any other, and verified before they are used.

torch.distributed.checkpoint keeps its index in a pickle, which executes code when it is read. Here the index is JSON,
next to one safetensors file per rank. save.py writes checkpoints, load.py reads them, folder.py is the layout on disk.
"""
