"""Reference engine: greedy decoding of one prompt, plain and with a draft, over the same target passes and KV cache.

Lossless by construction: a drafted token becomes output only if it is the target's own arg-max after everything
before it. Only rounding can part the two outputs, since a pass over n+1 tokens adds up in another order than a pass
over one; `parting` tells such a tie from a fault.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from eyas.draft.model import Eagle3DraftModel
from eyas.errors import EyasError
from eyas.target.backend import Target
from eyas.target.generate import _Layer

# float32 sums of a thousand products are rounded in every addition; half types add up in float32 and round once a
# layer. Largest difference of logits between a pass over one and over four tokens, SmolLM2-135M: a third of this.
TIE_FACTOR = {torch.float32: 64.0, torch.bfloat16: 4.0, torch.float16: 4.0}


@dataclass(frozen=True)
class Decoded:
    """An answer: its ids (the end-of-turn id included), accepted draft tokens of each round, wall seconds."""

    token_ids: list[int]
    rounds: list[int]
    seconds: float


class _Sequence:
    """One sequence in the target's KV cache."""

    def __init__(self, target: Target, room: int):
        self.target = target
        self.layers = [_Layer(room) for _ in range(target.spec.num_layers)]
        self.arguments: dict[str, Any] = {target.cache_argument: Cache(layers=self.layers), "use_cache": True}

    def step(self, tokens: Tensor, keep: int) -> Tensor:
        """Append tokens [T]; logits [keep, V] of the last `keep` of them."""
        return self.target.model(input_ids=tokens[None], logits_to_keep=keep, **self.arguments).logits[0]

    def crop(self, length: int) -> None:
        """Forget what lies behind the first `length` tokens."""
        for layer in self.layers:
            layer.length = length


def longest(target: Target, draft: Eagle3DraftModel | None = None) -> int:
    """Tokens that a prompt and its answer may have together: the positions both models know."""
    limits = [target.spec.max_position_embeddings]
    return min(limits + ([draft.config.max_position_embeddings] if draft else []))


@torch.inference_mode()
def plain_decode(target: Target, prompt_ids: list[int], max_new_tokens: int) -> Decoded:
    """Greedy decoding, one target pass a token. Stops at an eos id, `max_new_tokens` or the last position.

    Raises EyasError for a prompt that is empty or leaves no room for an answer.
    """
    started = time.perf_counter()
    end = _end(prompt_ids, max_new_tokens, longest(target))
    stops = set(target.spec.eos_token_ids)
    sequence, ids = _Sequence(target, end), list(prompt_ids)
    tokens = torch.tensor(prompt_ids, device=target.device)  # [T], then [1]
    while True:
        tokens = sequence.step(tokens, keep=1).argmax(-1)  # [1]
        ids.append(int(tokens))
        if ids[-1] in stops or len(ids) == end:
            return Decoded(ids[len(prompt_ids) :], [], time.perf_counter() - started)


@torch.inference_mode()
def speculative_decode(
    target: Target, draft: Eagle3DraftModel, prompt_ids: list[int], max_new_tokens: int, draft_tokens: int
) -> Decoded:
    """The same output by rounds: the draft proposes a chain of `draft_tokens`, one target pass verifies it.

    Draft row t pairs the target's aux states of token t with token t+1. The first draft pass of a round covers the
    newly accepted positions with their true states, then the chain goes on from the draft's own state, one row a
    token; its rows are dropped from the cache afterwards. Near the last position the chain is shortened to fit.
    Stops and errors as `plain_decode`; a round that ends the answer is cut there.
    """
    started = time.perf_counter()
    limit = longest(target, draft)
    end = _end(prompt_ids, max_new_tokens, limit)
    stops = set(target.spec.eos_token_ids)
    aux_layers = draft.config.aux_layers
    sequence, ids = _Sequence(target, end + draft_tokens), list(prompt_ids)
    cache = draft.new_cache(end + draft_tokens)
    rounds: list[int] = []
    with target._boundaries(set(aux_layers)) as states:
        tokens = torch.tensor(prompt_ids, device=target.device)
        bonus = sequence.step(tokens, keep=1).argmax(-1)  # [1]
        new = torch.cat([tokens[1:], bonus])  # [T]: the token after each newly verified position
        ids.append(int(bonus))
        while ids[-1] not in stops and len(ids) < end:
            chain = [bonus]
            aux = torch.cat([states[i][0, : len(new)] for i in aux_layers], -1)  # [T, A*H]
            logits, state = draft.decode_step(draft.fuse(aux), new, cache)  # [Vd], [H]
            verified = cache.length
            for k in range(min(draft_tokens, limit - len(ids))):
                if k:
                    logits, state = draft.decode_step(state[None], chain[-1], cache)
                chain.append(draft.to_target_ids(logits.argmax(-1, keepdim=True)))  # [1]
            cache.crop(verified)

            given = torch.cat(chain)  # [n+1]: the last known token, then the chain
            own = sequence.step(given, keep=len(given)).argmax(-1)  # [n+1]: the target's token after each of them
            accepted = int((given[1:] == own[:-1]).cumprod(0).sum())
            sequence.crop(len(ids) + accepted)
            new, bonus = own[: accepted + 1], own[accepted : accepted + 1]
            emitted = _until_end(new.tolist(), stops, end - len(ids))
            ids += emitted
            rounds.append(min(accepted, len(emitted)))
    return Decoded(ids[len(prompt_ids) :], rounds, time.perf_counter() - started)


@torch.inference_mode()
def parting(target: Target, prompt_ids: list[int], plain: list[int], speculative: list[int]) -> dict[str, Any]:
    """How two answers to one prompt compare: `verdict` identical, tie or different.

    Where they part, the target reads their common prefix once more: `gap` is how far apart its logits of the two
    tokens are, `tolerance` what rounding may do (`TIE_FACTOR` * eps of the dtype * largest logit). An answer that
    is the beginning of the other is different.
    """
    if plain == speculative:
        return {"verdict": "identical"}
    shared = min(len(plain), len(speculative))
    position = next((i for i in range(shared) if plain[i] != speculative[i]), shared)
    if position == shared:
        return {"verdict": "different", "position": position, "gap": None, "tolerance": None}
    tokens = torch.tensor(prompt_ids + plain[:position], device=target.device)
    logits = _Sequence(target, len(tokens)).step(tokens, keep=1)[0]  # [V]
    tolerance = TIE_FACTOR[logits.dtype] * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    gap = abs(float(logits[plain[position]]) - float(logits[speculative[position]]))
    verdict = "tie" if gap <= tolerance else "different"
    return {"verdict": verdict, "position": position, "gap": gap, "tolerance": tolerance}


def _end(prompt_ids: list[int], max_new_tokens: int, limit: int) -> int:
    """Length at which the sequence must stop."""
    if not 0 < len(prompt_ids) < limit:
        raise EyasError(
            f"the prompt has {len(prompt_ids)} tokens; the models read 1 to {limit - 1} before an answer",
            "shorten the prompt; the smaller max_position_embeddings of target and draft is the limit",
        )
    return min(len(prompt_ids) + max_new_tokens, limit)


def _until_end(tokens: list[int], stops: set[int], room: int) -> list[int]:
    """`tokens` up to and including the first stop id, at most `room` of them."""
    stop = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[: min(stop, room)]
