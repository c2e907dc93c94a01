"""AdamW, its learning rate, and the gradient norm."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from eyas.config import TrainConfig


def adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay on matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Rate of optimiser step `step` (from 0) of `total`: linear warm-up to `lr`, cosine to `min_lr` * `lr`."""
    warm = round(config.warmup * total)
    if step < warm:
        return config.lr * (step + 1) / warm
    done = (step + 1 - warm) / (total - warm)
    return config.lr * (config.min_lr + (1 - config.min_lr) * 0.5 * (1 + math.cos(math.pi * done)))


def update(optimizer: torch.optim.AdamW, limit: float, loss: Tensor) -> Tensor:
    """One step with gradients scaled to a norm of at most `limit` (0: as they are); returns the norm before.

    Weights and moments stay as they are when the norm or the loss is not finite. Neither is waited for: the fused
    kernel itself divides by `grad_scale` and heeds `found_inf`, the way torch.amp's GradScaler drives it.
    """
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    driven: Any = optimizer
    driven.grad_scale = (norm / limit).clamp(min=1.0).float() if limit else None
    driven.found_inf = (~(norm + loss).isfinite()).float()
    optimizer.step()
    optimizer.zero_grad()
    return norm
