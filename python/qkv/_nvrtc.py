"""Locates NVRTC, CUDA's compiler, in the CUDA packages of this environment: those of PyTorch, CuPy or JAX."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from . import _qkv


def look_for_compiler() -> None:
    """Tells the native module where to look, when it first needs a device: the packages' own compiler comes first."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        for found in Path(root).glob("*/lib/libnvrtc.so*"):
            _qkv.cuda_look_in(str(found.parent))
