"""Triton kernels on a CPU, by Triton's interpreter: in a process of its own with TRITON_INTERPRET=1.

`install` fixes gaps of the interpreter (Triton 3.6): it multiplies the bits of bf16 numbers, rounds to bf16 towards
zero, and cannot read the end of a range with numpy 2.4. It checks values, not what a GPU compiles: no limits of shared
memory, no layouts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def run(module: str, *arguments: str) -> Any:
    """Run a test module's main in the interpreter and return the JSON of its last line."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


def install() -> None:
    """Fix the interpreter of this process."""
    import numpy as np
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
    from triton.runtime import interpreter  # type: ignore[import-not-found, unused-ignore]

    builder: Any = interpreter.InterpreterBuilder
    product, patch_tensor = builder.create_dot, interpreter._patch_lang_tensor
    convert = interpreter._convert_float

    def convert_float(data: Any, source: Any, to: Any, rounding: Any) -> Any:
        if (source, to) == (tl.bfloat16, tl.float32):
            return (data.astype(np.uint32) << 16).view(np.float32)
        if (source, to) == (tl.float32, tl.bfloat16):
            low = torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16)
            return low.view(torch.int16).numpy().view(np.uint16)
        return convert(data, source, to, rounding)

    def upcast(one: Any) -> Any:
        if one.dtype.scalar != tl.bfloat16:
            return one
        return interpreter.TensorHandle(convert_float(one.data, tl.bfloat16, tl.float32, None), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return product(self, upcast(a), upcast(b), *more)

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    builder.create_dot = create_dot
    interpreter._convert_float = convert_float
    interpreter._patch_lang_tensor = patch
