"""Batched answers of the target: left-padded prompts, one preallocated KV cache, rows leave when they are done."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from eyas.errors import EyasError
from eyas.target.backend import Target


class KVLayer(DynamicLayer):
    """Keys and values [B, heads, room, d] allocated once; a step writes its own column and hands out views."""

    def __init__(self, room: int):
        super().__init__()
        self.room, self.length = room, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """key_states, value_states [B, heads, t, d] -> everything so far [B, heads, length, d]."""
        if not self.is_initialized:
            self.keys, self.values = (
                x.new_empty(*x.shape[:2], self.room, x.shape[-1]) for x in (key_states, value_states)
            )
            self.device, self.is_initialized = key_states.device, True
        assert self.keys is not None and self.values is not None
        start, self.length = self.length, self.length + key_states.shape[-2]
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_seq_length(self, *_: Any) -> int:
        return self.length

    def keep(self, rows: Tensor) -> None:
        """Move the rows that go on to the front, in place, and forget the others."""
        for name in ("keys", "values"):
            states = getattr(self, name)
            states[: len(rows), :, : self.length] = states[rows, :, : self.length]
            setattr(self, name, states[: len(rows)])


@torch.inference_mode()
def generate(
    target: Target,
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[list[int]]:
    """New ids of each prompt, its eos included; at most `max_new_tokens`, or what the target's window leaves.

    temperature 0 is greedy. Otherwise each prompt draws from its own generator, seeded by (seed, hash of its ids),
    so an answer does not depend on its batch. Raises EyasError for a prompt that is empty or fills the window.
    """
    kinds = set(getattr(target.model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    if unknown := kinds - {"full_attention", "sliding_attention", "chunked_attention"}:
        raise EyasError(f"{target.spec.name}: answers cannot be generated with layers of type {sorted(unknown)}")
    if not prompts:
        return []
    window = target.spec.max_position_embeddings
    if unfit := [len(p) for p in prompts if not 0 < len(p) < window]:
        raise EyasError(f"prompts of {unfit} tokens; expected 1 to {window - 1}")
    limits = [min(max_new_tokens, window - len(p)) for p in prompts]
    generators, eos = [_generator(seed, p) for p in prompts], set(target.spec.eos_token_ids)
    width, device = max(map(len, prompts)), target.device
    room = width + max(limits)
    layers = [KVLayer(room) for _ in range(target.spec.num_layers)]
    # Sliding-window layers keep all that they saw, too: their mask hides what is too old.
    cache = Cache(layers=[*layers])
    tokens = torch.tensor([[p[0]] * (width - len(p)) + p for p in prompts], device=device)  # [B, width]
    padding = torch.tensor([[width - len(p)] for p in prompts], device=device)  # [B, 1]
    mask = (torch.arange(room, device=device) >= padding).long()  # [B, room]
    positions = (torch.arange(width, device=device) - padding).clamp(min=0)  # [B, width]
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # the prompt that each row of the batch answers
    finished: set[int] = set()
    while True:
        logits = target.model(
            input_ids=tokens,
            attention_mask=mask[:, : layers[0].length + tokens.shape[1]],
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{target.cache_argument: cache},
        ).logits[:, -1]  # [B, V]
        chosen = logits.argmax(-1)  # [B]
        if temperature > 0:
            chosen = _sample(logits, temperature, top_p, [generators[r] for r in rows])
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if row not in finished:
                answers[row].append(token)
                if token in eos or len(answers[row]) == limits[row]:
                    finished.add(row)
        if not (going := [i for i, row in enumerate(rows) if row not in finished]):
            return answers
        positions = positions[:, -1:] + 1  # [B, 1]
        if len(going) <= len(rows) // 2:
            index = torch.tensor(going, device=device)
            rows, chosen, mask, positions = [rows[i] for i in going], chosen[index], mask[index], positions[index]
            for layer in layers:
                layer.keep(index)
        tokens = chosen[:, None]  # [B, 1]


def _generator(seed: int, prompt: list[int]) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:".encode() + np.asarray(prompt, np.int64).tobytes()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _sample(logits: Tensor, temperature: float, top_p: float, generators: list[torch.Generator]) -> Tensor:
    """One id a row [B] of logits [B, V], from the fewest most probable ids that hold `top_p` together."""
    probabilities, ids = (logits.float() / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    total = probabilities.cumsum(-1)  # [B, V]
    inside = total - probabilities < top_p  # the first id always is
    draws = torch.stack([torch.rand((), generator=g) for g in generators]).to(logits.device)  # [B]
    point = draws * (probabilities * inside).sum(-1)
    pick = torch.searchsorted(total, point[:, None], right=True)  # [B, 1]
    return ids.gather(-1, pick.clamp(max=inside.sum(-1, keepdim=True) - 1))[:, 0]
