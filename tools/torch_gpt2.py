"""A plain GPT-2 and its train step in PyTorch: what `bench_train.py --peer torch` runs beside ours.

The model is that of `maxmars.model` and the step that of AdamW in `maxmars.train.step`: pre-norm
blocks, GELU by tanh, tied embeddings, float32 parameters with products in the compute type, mean of
the microbatches' gradients, clip to a global norm, one learning rate after warmup, decay on
matrices only. Attention is PyTorch's own (SDPA), which is flash attention on GPUs.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int, bias: bool, epsilon: float) -> None:
        """Layers of one block."""
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width, eps=epsilon, bias=bias)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)
        self.ln_2 = nn.LayerNorm(width, eps=epsilon, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, length, width]."""
        rows, length, width = x.shape
        qkv = self.qkv(self.ln_1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 with tied embeddings; a call gives the mean loss."""

    def __init__(self, model: dict[str, Any], vocab_rows: int) -> None:
        """A model of the sizes in `to_dict(GPT2Config)`; `vocab_rows` includes the padding."""
        super().__init__()
        width, bias, epsilon = model["embed_dim"], model["use_bias"], model["layer_norm_epsilon"]
        self.wte = nn.Embedding(vocab_rows, width)
        self.wpe = nn.Embedding(model["max_seq_len"], width)
        blocks = [
            Block(width, model["num_heads"], bias, epsilon) for _ in range(model["num_layers"])
        ]
        self.h = nn.ModuleList(blocks)
        self.ln_f = nn.LayerNorm(width, eps=epsilon, bias=bias)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean nats a token; tokens and targets are [rows, length]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits = functional.linear(self.ln_f(x), self.wte.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class TorchSteps:
    """Train steps in PyTorch on tokens that are on the device from the start."""

    def __init__(self, config: dict[str, Any], vocab_rows: int, *, compiled: bool) -> None:
        """Make the model and take the first step, which compiles.

        Args:
          config: `to_dict(TrainConfig)` of the run to imitate.
          vocab_rows: rows of the token embedding.
          compiled: whether the model goes through `torch.compile`.
        """
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")  # TF32 on a GPU, as JAX's default
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.config = config
        model = GPT2(config["model"], vocab_rows).to(self.device)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.parameters = list(model.parameters())
        matrices = [p for p in self.parameters if p.ndim == 2]
        vectors = [p for p in self.parameters if p.ndim != 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}]
        # Fused: the update in one pass, as XLA's is.
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
        self.model = torch.compile(model) if compiled else model
        count = config["num_microbatches"]
        rows, length = config["global_batch_size"] // count, config["model"]["max_seq_len"]
        shape = (count, rows, length + 1)
        self.tokens = torch.randint(config["model"]["vocab_size"], shape, device=self.device)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Products in bfloat16 if the config says so."""
        if self.config["model"]["compute_dtype"] == "bfloat16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def step(self) -> torch.Tensor:
        """One optimizer step; its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for rows in self.tokens:
            with self.precision():
                loss = self.model(rows[:, :-1], rows[:, 1:])
            (loss / len(self.tokens)).backward()
            total += loss.detach() / len(self.tokens)
        if self.config["gradient_clip_norm"] is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.config["gradient_clip_norm"])
        self.optimizer.step()
        return total

    def wait(self) -> None:
        """Until the device has done all."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def run(self, steps: int) -> dict[str, float]:
        """Seconds a step, and the last loss."""
        self.wait()
        started = time.perf_counter()
        loss = torch.zeros(())
        for _ in range(steps):
            loss = self.step()
        self.wait()
        return {"step": (time.perf_counter() - started) / steps, "loss": loss.item()}

    def describe(self) -> dict[str, Any]:
        """Versions, device and memory."""
        found = {"torch": torch.__version__, "parameters": self.num_parameters}
        if self.device.type == "cuda":
            found["device"] = torch.cuda.get_device_name()
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
        else:
            found["device"], found["threads"] = "cpu", torch.get_num_threads()
        return found
