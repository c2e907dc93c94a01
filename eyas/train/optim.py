"""AdamW, its learning rate, and the gradient norm."""

import math

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


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> Tensor:
    """Scale gradients to a norm of at most `limit` (0: leave them). Returns the norm before, 0-dim."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if limit:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm
