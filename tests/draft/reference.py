"""EAGLE-3 training loss, written plainly: one document at a time, every row at every step, full logits, autograd.

Works on whole, unshifted documents and a dict of tensors by their checkpoint names; shares no code with the model.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.draft import Eagle3DraftConfig, TrainBatch


class Document(NamedTuple):
    x: Tensor  # [T] tokens
    aux: Tensor  # [T, A * H]
    last: Tensor  # [T, H] before the final norm
    mask: Tensor  # [T] bool


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [rows, heads, d]: channels i and i + d/2 turn as one complex number."""
    d = x.shape[-1]
    frequencies = (1.0 / theta ** (torch.arange(0, d, 2, dtype=torch.float32) / d)).to(x.dtype)
    angle = positions.to(x.dtype)[:, None, None] * frequencies
    turned = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """q [R, nh, d]; keys and values of steps 0..k, each [R, nkv, d] -> [R, nh * d]."""
    rows, heads, d = q.shape
    causal = torch.ones(rows, rows).tril().bool()
    mask = torch.cat([causal] + [torch.eye(rows).bool()] * (len(keys) - 1), 1)  # [R, (k + 1) * R]
    out = []
    for head in range(heads):
        shared = head * keys[0].shape[1] // heads
        k, v = (torch.cat([x[:, shared] for x in xs]) for xs in (keys, values))
        scores = (q[:, head] @ k.T / math.sqrt(d)).masked_fill(~mask, float("-inf"))
        out.append(scores.softmax(-1) @ v)
    return torch.cat(out, -1)


def step_logits(
    config: Eagle3DraftConfig, w: dict[str, Tensor], embed: Tensor, document: Document, steps: int
) -> list[Tensor]:
    """Logits [T - 1, Vd] of each step; rows whose token lies behind the document are computed on token 0."""
    eps, theta, layer = config.rms_norm_eps, config.rope_parameters["rope_theta"], "layers.0."
    aux = document.aux[:-1]
    if config.norm_before_fc:
        aux = rms_norm(aux, w["input_norm.weight"], eps)
    if config.fc_norm:
        parts = aux.split(config.hidden_size, -1)
        aux = torch.cat([rms_norm(a, w[f"fc_norm.{j}.weight"], eps) for j, a in enumerate(parts)], -1)
    g = aux @ w["fc.weight"].T
    rows, keys, values, logits = torch.arange(len(g)), [], [], []
    for k in range(steps):
        ahead = rows + 1 + k
        token = torch.where(ahead < len(document.x), document.x[ahead.clamp(max=len(document.x) - 1)], 0)
        hidden = rms_norm(g, w[layer + "hidden_norm.weight"], eps)
        u = torch.cat([rms_norm(embed[token], w[layer + "input_layernorm.weight"], eps), hidden], -1)
        q, key, value = (
            (u @ w[f"{layer}self_attn.{n}_proj.weight"].T).view(len(g), -1, config.head_dim) for n in "qkv"
        )
        keys.append(rope(key, rows + k, theta))
        values.append(value)
        attended = attend(rope(q, rows + k, theta), keys, values) @ w[layer + "self_attn.o_proj.weight"].T
        s = (hidden if config.norm_before_residual else g) + attended
        m = rms_norm(s, w[layer + "post_attention_layernorm.weight"], eps)
        gate = m @ w[layer + "mlp.gate_proj.weight"].T
        up = m @ w[layer + "mlp.up_proj.weight"].T
        o = s + (gate * gate.sigmoid() * up) @ w[layer + "mlp.down_proj.weight"].T
        n = rms_norm(o, w["norm.weight"], eps)
        logits.append(n @ w["lm_head.weight"].T)
        g = n if config.norm_output else o
    return logits


def loss(
    config: Eagle3DraftConfig,
    w: dict[str, Tensor],
    embed: Tensor,
    target_probs: list[Tensor],
    documents: list[Document],
    steps: int,
    decay: float,
) -> Tensor:
    """target_probs: for each document [T, Vd], row p the target's distribution over token p + 1."""
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    logits = [step_logits(config, w, embed, document, steps) for document in documents]
    for k in range(steps):
        kls = [
            (p * (p.log() - torch.log_softmax(out[k][t], -1))).sum()
            for document, out, probs in zip(documents, logits, target_probs, strict=True)
            for t in range(len(document.x) - 1)
            if t + 1 + k < len(document.x) and document.mask[t + 1 + k]
            for p in [probs[t + 1 + k]]
        ]
        if kls:
            total = total + decay**k * torch.stack(kls).mean()
        weight += decay**k
    return total / weight


def pack(documents: list[Document]) -> TrainBatch:
    """The documents as shifted, packed rows."""
    sizes = torch.tensor([len(d.x) - 1 for d in documents])
    ends = sizes.cumsum(0)
    return TrainBatch(
        input_ids=torch.cat([d.x[1:] for d in documents]),
        aux=torch.cat([d.aux[:-1] for d in documents]),
        targets=torch.cat([d.last[1:][d.mask[1:]] for d in documents]),
        supervised=torch.cat([d.mask[1:] for d in documents]),
        doc_start=(ends - sizes).repeat_interleave(sizes),
        doc_end=ends.repeat_interleave(sizes),
    )
