"""What could be wrong with a last hidden state, and how well the target's head would predict if it were so."""

from itertools import permutations

import torch
from torch import Tensor

from eyas.preflight.finding import Subject

MARGIN = 0.07  # three standard errors of a share of 512 rows
WIDE = 0.14  # and of the 128 rows that guesses are tried on
TRIED = 128
AUX = "the highest aux layer in its place"  # says whether tokens and head fit; no way to mend anything


def predict(states: Tensor, head: Tensor) -> Tensor:
    """Logits [R, V]; the head [V, H] is never copied whole."""
    return torch.cat([states @ part.float().T for part in head.split(1 << 14)], 1)


def table(s: Subject, tokens: Tensor, last: Tensor, aux: Tensor, normed: bool) -> dict[str, float]:
    """Top-1 share of each guess: tokens [R] to be predicted from last [R, H] as stored, aux [R, H] the highest."""
    step = max(1, len(tokens) // TRIED)
    tokens, last, aux = tokens[::step], last[::step], aux[::step]
    head, norm = s.weights.lm_head(), s.weights.final_norm().float()
    as_is, weight = (last if normed else norm(last)), norm.weight + (norm.flavour == "gemma")
    weight = torch.ones_like(weight) if normed else weight
    tries = {
        ("the final norm applied twice" if normed else "the final norm already applied"): norm(last)
        if normed
        else last,
        AUX: norm(aux),
    }
    for parts in (2, 4, 8):
        if last.shape[1] % parts == 0 and (order := chunk_order(tokens, last, head, weight, parts)):
            moved = last.unflatten(1, (parts, -1))[:, order].flatten(1)
            name = f"{parts} parts of the hidden dimension (tensor-parallel ranks) read in the order {order}"
            tries[name] = moved if normed else norm(moved)
    shares = {name: share(predict(states, head), tokens) for name, states in tries.items()}
    if not s.spec.tie_word_embeddings:
        shares["lm_head is the embedding"] = share(predict(as_is, s.weights.embed_tokens()), tokens)
    return shares


def share(scores: Tensor, tokens: Tensor) -> float:
    return float((scores.argmax(1) == tokens).float().mean())


def chunk_order(tokens: Tensor, last: Tensor, head: Tensor, weight: Tensor, parts: int) -> list[int] | None:
    """Which stored part to read as part 0, 1, ...: the order in which the true tokens' logits stand out most.

    A logit is a sum over channels: each (stored part, place) pair adds its share, and an order is worth the sum of
    its pairs. None where the stored order is the best.
    """
    states = last * torch.rsqrt(last.square().mean(1, keepdim=True) + 1e-6)
    rows = (head[tokens].float() - head[tokens.roll(1)].float()) * weight  # [R, H] true less another token
    a, b = states.unflatten(1, (parts, -1)), rows.unflatten(1, (parts, -1))  # [R, p, h]
    worth = torch.einsum("rih,rjh->ij", a, b)  # [stored part, place]
    orders = torch.tensor(list(permutations(range(parts))))  # [n!, p]: the stored part for each place
    best = orders[worth[orders, torch.arange(parts)].sum(1).argmax()].tolist()
    return None if best == list(range(parts)) else best


def best_guess(guesses: dict[str, float]) -> str:
    """The guess that predicts clearly better than the states as they are stored; empty when none does."""
    stored, guesses = guesses["as stored"], {name: share for name, share in guesses.items() if name != AUX}
    name = max(guesses, key=lambda k: guesses[k] - (0 if k.startswith("row p is") else WIDE - MARGIN))
    return name if guesses[name] > stored + (MARGIN if name.startswith("row p is") else WIDE) else ""


def told(guesses: dict[str, float]) -> str:
    """The table in a line."""
    return ", ".join(f"{name} {share:.0%}" for name, share in guesses.items())


def survivors(s: Subject) -> float:
    """Share of the sampled ids that come back when the target's tokenizer decodes and encodes them."""
    kept = total = 0
    for f in s.samples[:4]:
        ids = f.token_ids[:512].tolist()
        again = s.tokenizer(s.tokenizer.decode(ids), add_special_tokens=False)["input_ids"]
        kept, total = kept + sum(a == b for a, b in zip(ids, again, strict=False)), total + len(ids)
    return kept / max(total, 1)
