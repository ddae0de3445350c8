"""Training steps of Hugging Face models with each attention, in turns: `python -m qkv.bench --models`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

# name: (model, configuration, settings, batch, tokens)
_LLAMA = dict(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=8,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)
_GPT2 = dict(vocab_size=50257, n_embd=768, n_layer=12, n_head=12, n_positions=1024)
_DROPLESS = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
_MODELS = {
    "Llama-shaped, 8 layers of 2,048, 2 × 4,096 tokens": ("LlamaForCausalLM", "LlamaConfig", _LLAMA, 2, 4096),
    "GPT-2, 124 M, 8 × 1,024 tokens": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, **_DROPLESS}, 8, 1024),
    "Llama-shaped, a third of the tokens padding": ("LlamaForCausalLM", "LlamaConfig", _LLAMA, 2, 4096),
    "GPT-2, 124 M, 8 × 1,024 tokens, with its dropout": ("GPT2LMHeadModel", "GPT2Config", _GPT2, 8, 1024),
}
_IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2", "qkv")


def steps(device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """One row for each model and implementation, as they are measured: the best time of a step, the peak memory of
    tensors, and the loss of the first step. The row of an implementation that is not available says why."""
    for name in _MODELS:
        made = {}
        for implementation in _IMPLEMENTATIONS:
            try:
                made[implementation] = _Step(name, implementation, device)
            except (ImportError, ValueError, RuntimeError) as error:
                yield {"model": name, "attention": implementation, "why": str(error).split(". ")[0][:120]}
        end, turns = time.perf_counter() + seconds * len(made), 0
        while turns < 3 or time.perf_counter() < end:
            for step in made.values():
                step.run()
            turns += 1
        yield from (step.row(name, implementation) for implementation, step in made.items())


class _Step:
    """A model with its optimizer and a batch."""

    def __init__(self, name: str, implementation: str, device: str) -> None:
        import torch
        import transformers

        from . import hf

        hf.register()
        model, config, settings, batch, tokens = _MODELS[name]
        torch.manual_seed(0)
        made = getattr(transformers, config)(**settings)
        with torch.device(device):
            build = getattr(transformers, model)._from_config
            self.model = build(made, attn_implementation=implementation, dtype=torch.bfloat16)
        self.model.to(device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")
        ids = torch.randint(3, 1000, (batch, tokens), generator=torch.Generator().manual_seed(1)).to(device)
        self.batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
        if "padding" in name:
            real = torch.ones_like(ids)
            real[1::2, tokens // 3 :] = 0
            self.batch = {"input_ids": ids, "attention_mask": real, "labels": ids.masked_fill(real == 0, -100)}
        self.cuda, self.best, self.memory = device == "cuda", float("inf"), 0.0
        torch.manual_seed(2)
        self.loss = self.run()
        self.run()
        self.best = float("inf")

    def run(self) -> float:
        import torch

        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        start = time.perf_counter()
        loss = self.model(**self.batch, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        number = loss.item()
        if self.cuda:
            torch.cuda.synchronize()
            # Count only this model's memory: other models are resident while they wait for their turn.
            own = sum(p.numel() * p.element_size() for p in self.model.parameters())
            self.memory = (torch.cuda.max_memory_allocated() - held + 3 * own) / 1e9
        self.best = min(self.best, time.perf_counter() - start)
        return number

    def row(self, model: str, implementation: str) -> dict[str, Any]:
        return {
            "model": model,
            "attention": implementation,
            "ms": 1e3 * self.best,
            "memory_gb": self.memory,
            "loss": self.loss,
        }
