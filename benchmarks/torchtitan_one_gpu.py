"""Train with torchtitan on one GPU and synthetic tokens: no tokenizer, dataset or network.

    python benchmarks/torchtitan_one_gpu.py [--wait] [--layers N] TORCHTITAN_ARGUMENT...

Starts torchtitan's own Trainer with its own arguments, such as `--model.name=llama3 --model.flavor=8B`. Only the
dataloader is replaced; `--layers` keeps the first layers of the flavor. Its log lines hold tokens per second and the
reserved memory; the last line here is the peak of allocated memory in the last step, which torchtitan must not log.
`--wait` waits for a line on stdin after the imports. Without a GPU the CPU is used, to test the arguments.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch


class SyntheticTokens:
    """Endless batches of random tokens, shaped as torchtitan's text dataloader yields them."""

    def __init__(self, vocab_size: int, batch_size: int, seq_length: int) -> None:
        self.size = (batch_size, seq_length + 1)
        self.vocab_size = vocab_size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            tokens = torch.randint(self.vocab_size, self.size, generator=generator)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save: checkpoints are off."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load: checkpoints are off."""


def stand_in_for_missing() -> None:
    """Define the two optional classes that torchtitan imports and this run does not use, where not installed."""
    for package, name, holder in (
        ("torchdata", "StatefulDataLoader", "torchdata.stateful_dataloader"),
        ("tensorboard", "SummaryWriter", "torch.utils.tensorboard"),
    ):
        if importlib.util.find_spec(package) is None:
            module = ModuleType(holder)
            setattr(module, name, type(name, (), {}))
            sys.modules[holder] = module
            if package == "torchdata":
                sys.modules[package] = ModuleType(package)


def use_cpu() -> None:
    """Let torchtitan, which expects an accelerator, find the CPU."""
    nothing = SimpleNamespace(total_memory=1)
    cpu = SimpleNamespace(
        set_device=lambda device: None,
        current_device=lambda: 0,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: nothing,
        memory_stats=lambda device: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        synchronize=lambda *device: None,
    )
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device: cpu
    if importlib.util.find_spec("triton") is None:  # the kernels that torchtitan defines are not called on CPU
        # The stand-in is too little for these: they come first.
        for name in ("functorch.compile", "torch._inductor.compile_fx", "torchao.float8"):
            importlib.import_module(name)
        triton, language = ModuleType("triton"), ModuleType("triton.language")
        triton.jit, triton.language, language.constexpr = lambda function: function, language, int  # type: ignore
        sys.modules.update({"triton": triton, "triton.language": language})


def one_rank() -> None:
    """Set what torchrun would: one rank on this machine, at a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})


def register(name: str, flavor: str, layers: int | None) -> None:
    """Register the model with synthetic tokens, and with fewer layers if so asked."""
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    spec = get_train_spec(name)
    arguments = spec.model_args[flavor]
    if layers:
        arguments = replace(arguments, n_layers=layers)

    def dataloader(*, job_config: Any, **_: Any) -> SyntheticTokens:
        training = job_config.training
        return SyntheticTokens(arguments.vocab_size, training.local_batch_size, training.seq_len)

    register_train_spec(
        name, replace(spec, build_tokenizer_fn=None, build_dataloader_fn=dataloader, model_args={flavor: arguments})
    )


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--layers", type=int)
    options, words = parser.parse_known_args()
    stand_in_for_missing()
    gpu = torch.cuda.is_available()
    if not gpu:
        use_cpu()
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    if not gpu:  # torch must not take the stand-in for an installed triton
        for name in ("triton", "triton.language"):
            if getattr(sys.modules.get(name), "__spec__", None) is None:
                sys.modules.pop(name, None)
    init_logger()
    config = ConfigManager().parse_args(words)
    register(config.model.name, config.model.flavor, options.layers)
    if options.wait:
        sys.stdin.readline()
    one_rank()
    trainer = Trainer(config)
    trainer.train()
    if gpu:
        print(f"peak allocated: {torch.cuda.max_memory_allocated() / 2**30:.2f}GiB", flush=True)
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
