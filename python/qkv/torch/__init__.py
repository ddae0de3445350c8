"""Attention for PyTorch: operators with autograd, fake tensors and `torch.compile`; modules; `install()`.

>>> import torch, qkv.torch
>>> from qkv import Attention, Mask
>>> q, k, v = (torch.randn(1, 8, 64, 32, requires_grad=True) for _ in range(3))
>>> local = Attention.scaled_dot().mask(Mask.causal() & Mask.window(16, 0))
>>> qkv.torch.attention(q, k, v, local).sum().backward()

`sdpa` has the arguments of `torch.nn.functional.scaled_dot_product_attention`, and `install()` puts the library behind
that function itself, for every model. Tensors are read and written where PyTorch has them, with any strides, on the CPU
and on NVIDIA GPUs: there on PyTorch's current stream, with its memory.
"""

from ._call import Result, attend, attention, sdpa, weights
from ._install import install, uninstall
from ._modules import BahdanauAttention, LuongAttention, MultiheadAttention

__all__ = [
    "BahdanauAttention",
    "LuongAttention",
    "MultiheadAttention",
    "Result",
    "attend",
    "attention",
    "install",
    "sdpa",
    "uninstall",
    "weights",
]
