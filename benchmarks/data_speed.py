"""Measure data loading throughput relative to a GPU's consumption: a table and a JSON file.

PYTHONPATH=src python benchmarks/data_speed.py

All runs use one rank with `THREADS` reader threads. The engine's rate is that of Llama-3-8B on one H200
(results/engine_h200_2026-11-15.json). The stall is how long a step waits for its batch while the device computes for
`STEP_S`, with and without prefetching.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from meshwright.engine.data.blend import Blend
from meshwright.engine.data.byte_level import write_byte_tokenizer
from meshwright.engine.data.megatron_files import open_megatron, write_stream
from meshwright.engine.data.mock import Mock
from meshwright.engine.data.open_dataset import open_dataset
from meshwright.engine.data.sample_types import Source
from meshwright.engine.data.sampler import Loader
from meshwright.engine.data.shards import Manifest, ShardWriter, StreamCorpus, open_shards, write_manifest
from meshwright.engine.data.shuffle import Shuffled
from meshwright.engine.mesh import SOLO, Mesh
from meshwright.recipes import types

ENGINE = 17_284  # tokens/s of one GPU
GOAL = 20
SEQ, BATCH, VOCAB = 4096, 16, 50_000
TOKENS = 64_000_000
DOCUMENT = 900  # tokens of a document, on average
THREADS = 2
PREFETCH = 2
STEPS = 40
STEP_S = 0.2  # this many tokens take one GPU 3.8 s


def write_tokens(folder: Path) -> Path:
    """Write a shard folder with mock documents."""
    folder.mkdir()
    random = np.random.default_rng(0)
    writer = ShardWriter(folder, "uint16", TOKENS // 4)
    documents = 0
    for _ in range(64):
        lengths = random.integers(DOCUMENT // 4, DOCUMENT * 7 // 4, size=TOKENS // 64 // DOCUMENT)
        writer.add(random.integers(VOCAB, size=int(lengths.sum()), dtype=np.int64), np.cumsum(lengths))
        documents += len(lengths)
    writer.close()
    manifest = Manifest(
        dtype="uint16",
        tokens=sum(shard.tokens for shard in writer.shards),
        documents=documents,
        max_token=writer.max_token,
        eos=None,
        tokenizer="none",
        tokenizer_sha256="",
        vocab=VOCAB,
        sources=[],
        shards=writer.shards,
    )
    write_manifest(folder, manifest)
    return folder


def write_conversations(path: Path) -> Path:
    """Write mock conversations of different lengths."""
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(4000):
            words = [" ".join(["word"] * int(n)) for n in random.integers(5, 200, size=2)]
            file.write(json.dumps({"prompt": words[0], "response": words[1]}) + "\n")
    return path


def sources(folder: Path) -> dict[str, Callable[[], Source]]:
    """Return the measured sources by name."""
    os.environ["MESHWRIGHT_CACHE"] = str(folder / "cache")
    stream, _ = open_shards(write_tokens(folder / "shards"))
    write_stream(stream, folder / "megatron", "uint16")
    megatron_stream = open_megatron(folder / "megatron").stream()

    def plain(packing: bool = False, of: Any = stream) -> Source:
        return Shuffled(StreamCorpus(of, SEQ, vocab=VOCAB, packing=packing), 1)

    def conversations() -> Source:
        data = types.Data(
            dataset=str(write_conversations(folder / "conversations.jsonl")),
            tokenizer=str(write_byte_tokenizer(folder / "tokenizer")),
            seq_length=SEQ,
            packing=True,
        )
        recipe = types.Recipe(name="bench", model="llama3_8b", goal="sft", cluster="1xH200", data=data)
        return open_dataset(recipe, VOCAB, False, None)

    return {
        "shards": plain,
        "shards, documents isolated": lambda: plain(True),
        "Megatron .bin/.idx": lambda: plain(of=megatron_stream),
        "Megatron, documents isolated": lambda: plain(True, megatron_stream),
        "blend of 3": lambda: Blend([plain(), plain(of=megatron_stream), plain()], [0.6, 0.3, 0.1]),
        "conversations, packed": conversations,
        "mock": lambda: Mock(VOCAB, SEQ, 1),
    }


def loader(source: Source, prefetch: int) -> Loader:
    """Return a loader of a single rank."""
    state: Any = None
    mesh = Mesh("cpu", SOLO, SOLO, SOLO, SOLO, SOLO, SOLO, SOLO, SOLO, SOLO, state, state, ((0,),))
    return Loader(
        source,
        mesh,
        global_batch=BATCH,
        micro_batch=1,
        positions=torch.arange(SEQ),
        per_token=True,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        prefetch=prefetch,
        readers=THREADS,
    )


def rate(source: Source) -> tuple[float, float]:
    """Return tokens per second of loading alone, per wall second and per CPU second."""
    data_loader = loader(source, PREFETCH)
    data_loader.batch(0)
    started, started_core = time.perf_counter(), time.process_time()
    for step in range(1, STEPS + 1):
        data_loader.batch(step)
    took, took_core = time.perf_counter() - started, time.process_time() - started_core
    data_loader.close()
    return STEPS * BATCH * SEQ / took, STEPS * BATCH * SEQ / took_core


def stall(source: Source, prefetch: int) -> float:
    """Return the median milliseconds a step waits for its batch while the device is busy in between."""
    data_loader = loader(source, prefetch)
    waits = []
    for step in range(STEPS // 2):
        started = time.perf_counter()
        batch = data_loader.batch(step)
        waits.append(time.perf_counter() - started)
        time.sleep(STEP_S)  # the host waits for the device
        del batch
    data_loader.close()
    return median(waits[1:]) * 1e3


def tokenize_speed(folder: Path) -> dict[str, Any]:
    """Measure tokenization in MB/s, with one process and with two."""
    path = folder / "text.jsonl"
    line = json.dumps({"text": "the quick brown fox jumps over the lazy dog, " * 60}) + "\n"
    path.write_text(line * (9_000_000 // len(line)))
    tokenizer = str(write_byte_tokenizer(folder / "bytes"))
    found = {}
    for workers in (1, 2):
        arguments = ([str(path)], tokenizer, str(folder / f"out{workers}"))
        # In a separate process: workers import the module they were started from, and this one imports torch.
        code = (
            f"from meshwright.engine.data.tokenize import tokenize; r = tokenize(*{arguments!r}, workers={workers}); "
        )
        code += "print(r.text_bytes / r.seconds / 1e6)"
        output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        found[f"{workers} processes" if workers > 1 else "1 process"] = round(float(output), 2)
    return found


def main() -> None:
    """Print and save the table."""
    rows = []
    print(f"{'source':28} {'tokens/s':>12} {'per core':>12} {'× one GPU':>10} {'stall ms':>9} {'without prefetch':>17}")
    with tempfile.TemporaryDirectory() as scratch:
        for name, open_source in sources(Path(scratch)).items():
            source = open_source()
            found, found_core = rate(source)
            row = {
                "source": name,
                "tokens_per_s": round(found),
                "tokens_per_core_s": round(found_core),
                "times_one_gpu": round(found / ENGINE, 1),
                "stall_ms": round(stall(source, PREFETCH), 3),
                "stall_without_prefetch_ms": round(stall(source, 0), 3),
            }
            rows.append(row)
            print("{:28} {:>12,} {:>12,} {:>9}× {:>9} {:>17}".format(*row.values()))
        text = tokenize_speed(Path(scratch))
        print(f"tokenization, MB of text per second with the byte tokenizer: {text}")
    result = {
        "date": date.today().isoformat(),
        "command": "python benchmarks/data_speed.py",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "settings": {"seq_length": SEQ, "samples": BATCH, "threads": THREADS, "prefetch": PREFETCH, "step_s": STEP_S},
        "engine_tokens_per_s_per_gpu": ENGINE,
        "goal_times": GOAL,
        "sources": rows,
        "tokenization_mb_per_s": text,
    }
    out = Path(__file__).parent / "results" / "data_speed.json"
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
