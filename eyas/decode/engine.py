"""Reference engine: greedy decoding of one prompt, plain and with a draft, by the same target passes and KV cache.

A drafted token becomes output only if it is the target's own arg-max after everything before it. So only rounding
can part the two outputs (a pass over n + 1 tokens adds up in another order than a pass over one): see `compare`.
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
from eyas.target.generate import KVLayer

# float32 rounds in every addition of a sum over thousands of products, half types once a layer. SmolLM2-135M, one
# token a pass against four: the gap of the leading logits moved by up to 1/7 (bfloat16: 1/2) of the tolerance.
TIE_FACTOR = {torch.float32: 64.0, torch.bfloat16: 4.0, torch.float16: 4.0}


@dataclass(frozen=True)
class Decoded:
    """An answer: its ids (the end-of-turn id included), the accepted draft tokens of each round, wall seconds."""

    token_ids: list[int]
    rounds: list[int]
    seconds: float


class _Sequence:
    """The target's KV cache of one sequence; cropping sets a number."""

    def __init__(self, target: Target, room: int):
        self.target, self.layers = target, [KVLayer(room) for _ in range(target.spec.num_layers)]
        self.arguments: dict[str, Any] = {target.cache_argument: Cache(layers=[*self.layers]), "use_cache": True}

    def step(self, tokens: Tensor, keep: int) -> Tensor:
        """Append tokens [T]; logits [keep, V] of the last `keep` of them."""
        return self.target.model(input_ids=tokens[None], logits_to_keep=keep, **self.arguments).logits[0]

    def crop(self, length: int) -> None:
        for layer in self.layers:
            layer.length = length


def longest(target: Target, draft: Eagle3DraftModel) -> int:
    """Positions that both models know: a prompt and its answer together may not have more tokens."""
    return min(target.spec.max_position_embeddings, draft.config.max_position_embeddings)


@torch.inference_mode()
def plain_decode(target: Target, prompt_ids: list[int], max_new_tokens: int) -> Decoded:
    """Greedy decoding, one target pass a token, up to an eos id, `max_new_tokens` or the last position.

    Raises EyasError for a prompt that is empty or leaves no room for an answer.
    """
    started = time.perf_counter()
    end = _end(prompt_ids, max_new_tokens, target.spec.max_position_embeddings)
    stops, answer = set(target.spec.eos_token_ids), []
    sequence = _Sequence(target, end)
    tokens = torch.tensor(prompt_ids, device=target.device)
    while not answer or (answer[-1] not in stops and len(prompt_ids) + len(answer) < end):
        tokens = sequence.step(tokens, keep=1).argmax(-1)  # [1]
        answer.append(int(tokens))
    return Decoded(answer, [], time.perf_counter() - started)


@torch.inference_mode()
def speculative_decode(
    target: Target, draft: Eagle3DraftModel, prompt_ids: list[int], max_new_tokens: int, draft_tokens: int
) -> Decoded:
    """The same output by rounds: the draft proposes a chain of `draft_tokens`, one target pass verifies it.

    Draft row t pairs the target's aux states of token t with token t+1. A round's first draft pass covers the new
    positions with their true states; the chain goes on from the draft's own state, a row a token, and its rows are
    dropped afterwards. A round that ends the answer is cut there. Stops and errors as `plain_decode`, with the
    smaller of the two models' last positions, before which the chain is shortened to fit.
    """
    started = time.perf_counter()
    limit = longest(target, draft)
    end = _end(prompt_ids, max_new_tokens, limit)
    stops, aux_layers, rounds = set(target.spec.eos_token_ids), draft.config.aux_layers, []
    sequence, cache = _Sequence(target, end + draft_tokens), draft.new_cache(end + draft_tokens)
    ids = [*prompt_ids]
    with target.boundaries(set(aux_layers)) as states:
        tokens = torch.tensor(prompt_ids, device=target.device)
        bonus = sequence.step(tokens, keep=1).argmax(-1)  # [1]
        new = torch.cat([tokens[1:], bonus])  # [T]: the token after each newly verified position
        ids.append(int(bonus))
        while ids[-1] not in stops and len(ids) < end:
            aux = torch.cat([states[i][0, : len(new)] for i in aux_layers], -1)  # [T, A*H]
            logits, state = draft.decode_step(draft.fuse(aux), new, cache)  # [Vd], [H]
            verified, chain = cache.length, [bonus]
            for k in range(min(draft_tokens, limit - len(ids))):
                if k:
                    logits, state = draft.decode_step(state[None], chain[-1], cache)
                chain.append(draft.to_target_ids(logits.argmax(-1, keepdim=True)))  # [1]
            cache.crop(verified)

            given = torch.cat(chain)  # [n+1]: the last known token and the chain
            own = sequence.step(given, keep=len(given)).argmax(-1)  # [n+1]: the target's token after each of them
            accepted = int((given[1:] == own[:-1]).cumprod(0).sum())
            sequence.crop(len(ids) + accepted)
            new, bonus = own[: accepted + 1], own[accepted : accepted + 1]
            emitted = new.tolist()[: end - len(ids)]
            emitted = emitted[: next((i + 1 for i, token in enumerate(emitted) if token in stops), None)]
            ids += emitted
            rounds.append(min(accepted, len(emitted)))
    return Decoded(ids[len(prompt_ids) :], rounds, time.perf_counter() - started)


@torch.inference_mode()
def compare(target: Target, prompt_ids: list[int], plain: list[int], speculative: list[int]) -> dict[str, Any]:
    """`verdict` of two answers: identical, tie or different; where they part, also position, gap and tolerance.

    There the target reads the common prefix once more: a tie is a gap between its logits of the two tokens that
    rounding can close (`TIE_FACTOR` * eps of the dtype * largest logit). The beginning of the other is no tie.
    """
    if plain == speculative:
        return {"verdict": "identical"}
    pairs = enumerate(zip(plain, speculative, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), None)
    if position is None:
        return {"verdict": "different", "position": min(len(plain), len(speculative))}
    tokens = torch.tensor(prompt_ids + plain[:position], device=target.device)
    logits = _Sequence(target, len(tokens)).step(tokens, keep=1)[0]  # [V]
    tolerance = TIE_FACTOR[logits.dtype] * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    gap = abs(float(logits[plain[position]]) - float(logits[speculative[position]]))
    verdict = "tie" if gap <= tolerance else "different"
    return {"verdict": verdict, "position": position, "gap": gap, "tolerance": tolerance}


def _end(prompt_ids: list[int], max_new_tokens: int, limit: int) -> int:
    """Length at which the sequence must stop."""
    if not 0 < len(prompt_ids) < limit:
        found = f"the prompt has {len(prompt_ids)} tokens"
        raise EyasError(f"{found}; the models read 1 to {limit - 1} before an answer", "shorten it")
    return min(len(prompt_ids) + max_new_tokens, limit)
