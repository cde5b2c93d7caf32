"""nanoGPT's train.py: gradients over several batches, a rate set by hand, the best checkpoint, generation.

Its model gives (logits, loss), and logits of the last place alone where it is given no targets.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import nn

from assigner import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.port import Log

    from assigner import Pipeline

SEED, CONTEXT, WIDTH, ROWS, VOCABULARY = 1337, 8, 16, 4, 17
MAX_ITERS, EVAL_INTERVAL, EVAL_ITERS, ACCUMULATION = 6, 2, 2, 2
LEARNING_RATE, MIN_RATE, WARM_UP, WEIGHT_DECAY, GRAD_CLIP = 1e-2, 1e-3, 2, 0.1, 0.5
MICRO_BATCHES, STOP_AT = 2, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.attn(self.ln_1(x)).view(rows, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(self.initialise)
        self.wte.weight = self.lm_head.weight

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))

    @torch.no_grad()
    def generate(self, idx: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            logits, _ = self(idx[:, -CONTEXT:])
            idx = torch.cat([idx, torch.multinomial(F.softmax(logits[:, -1, :], dim=-1), 1)], dim=1)
        return idx


def get_batch(split: str, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of a text: batch `number` of this split is the same whenever it is asked for."""
    generator = torch.Generator().manual_seed(2 * number + (split == "val"))
    start = torch.randint(100, (ROWS, 1), generator=generator) + (1000 if split == "val" else 0)
    window = ((start + torch.arange(CONTEXT + 1)) ** 2 // 5) % VOCABULARY
    return window[:, :-1], window[:, 1:]


def get_lr(iteration: int) -> float:
    if iteration < WARM_UP:
        return LEARNING_RATE * (iteration + 1) / (WARM_UP + 1)
    ratio = (iteration - WARM_UP) / (MAX_ITERS - WARM_UP)
    return MIN_RATE + 0.5 * (1 + math.cos(math.pi * ratio)) * (LEARNING_RATE - MIN_RATE)


def configure_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))


def plain(log: Log) -> nn.Module:
    torch.manual_seed(SEED)
    model = GPT().double()
    optimizer = configure_optimizer(model.parameters())

    @torch.no_grad()
    def estimate_loss() -> dict[str, float]:
        model.eval()
        out = {}
        for split in ("train", "val"):
            losses = torch.zeros(EVAL_ITERS, dtype=torch.float64)
            for k in range(EVAL_ITERS):
                x, y = get_batch(split, k)
                _, loss = model(x, y)
                losses[k] = loss.item()
            out[split] = losses.mean().item()
        model.train()
        return out

    best_val_loss, best = 1e9, {}
    for iter_num in range(MAX_ITERS):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        if iter_num % EVAL_INTERVAL == 0:
            losses = estimate_loss()
            log(**losses)
            if losses["val"] < best_val_loss:
                best_val_loss = losses["val"]
                best = {name: each.clone() for name, each in model.state_dict().items()}
        for micro_step in range(ACCUMULATION):
            x, y = get_batch("train", iter_num * ACCUMULATION + micro_step)
            _, loss = model(x, y)
            loss = loss / ACCUMULATION
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log(loss=loss.item() * ACCUMULATION)
    model.load_state_dict(best)
    return model


def workload() -> Workload:
    def batch(rows: int, generator: torch.Generator) -> Any:
        window = torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=generator)
        return (window[:, :-1], window[:, 1:]), None

    return Workload(
        model=lambda: GPT().double(),
        batch=batch,
        loss=lambda outputs, _: outputs[1],
        optimizer=configure_optimizer,
        batch_size=ROWS,
        seed=SEED,
        marks=("wte", "h.*", "lm_head"),
    )


def ported(pipeline: Pipeline, folder: Path, log: Log) -> None:
    def estimate_loss() -> dict[str, float]:
        out = {}
        for split in ("train", "val"):
            losses = torch.zeros(EVAL_ITERS, dtype=torch.float64)
            for k in range(EVAL_ITERS):
                losses[k] = pipeline.evaluate((get_batch(split, k), None))
            out[split] = losses.mean().item()
        return out

    best_val_loss = 1e9
    if (folder / "last").exists():
        best_val_loss = pipeline.load(folder / "last")["best_val_loss"]
    for iter_num in range(pipeline.steps, MAX_ITERS):
        for group in pipeline.optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        if iter_num % EVAL_INTERVAL == 0:
            losses = estimate_loss()
            log(**losses)
            if losses["val"] < best_val_loss:
                best_val_loss = losses["val"]
                pipeline.save(folder / "best", force=True)
        for micro_step in range(ACCUMULATION):
            batch = get_batch("train", iter_num * ACCUMULATION + micro_step)
            loss = pipeline.step((batch, None), update=False, scale=1 / ACCUMULATION)
        pipeline.clip_grad_norm_(GRAD_CLIP)
        pipeline.optimizer.step()
        pipeline.optimizer.zero_grad(set_to_none=True)
        log(loss=loss)
        if pipeline.stop_requested():
            pipeline.save(folder / "last", {"best_val_loss": best_val_loss})
            return
    pipeline.load(folder / "best")


def used(model: nn.Module) -> list[float]:
    """A sample."""
    torch.manual_seed(SEED)
    assert isinstance(model, GPT)
    return model.generate(torch.tensor([[3]]), 12)[0].tolist()
