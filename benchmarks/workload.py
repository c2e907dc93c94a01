"""The synthetic workload of the training benchmarks: a draft for a Llama-8B-shaped target, random states."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.draft import Eagle3DraftConfig, Eagle3DraftModel, TrainBatch
from eyas.target.norm import FinalNorm


@dataclass(frozen=True)
class Sizes:
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    draft_vocab: int = 32000
    rope_theta: float = 500000.0
    eps: float = 1e-5


SMALL = Sizes(64, 128, 4, 2, 16, 512, 128)  # to try the scripts on a CPU


def supervised_spans(share: float, length: int, lead: int, generator: torch.Generator, mean: int = 256) -> Tensor:
    """[length] bool: round(share * length) True in spans of about `mean`, none before `lead`, nor the last."""
    wanted = min(round(share * length), length - 1 - lead)
    number = max(1, round(wanted / min(mean, max(1, length // 8))))

    def parts(total: int, count: int, least: int) -> list[int]:
        cuts = torch.randint(0, total - least * count + 1, (count - 1,), generator=generator).sort().values
        edges = torch.cat([torch.tensor([0]), cuts, torch.tensor([total - least * count])])
        return (edges.diff() + least).tolist()

    mask, at = torch.zeros(length, dtype=torch.bool), lead
    gaps = parts(length - 1 - lead - wanted, number + 1, 0)
    for gap, span in zip(gaps, parts(wanted, number, 1), strict=False):
        mask[at + gap : at + gap + span] = True
        at += gap + span
    return mask


def rows(sizes: Sizes, share: float, documents: int, length: int, steps: int, device: str, dtype: torch.dtype):
    """Shifted rows of all documents: input ids [N], aux [N, 3H], last states [N, H], mask [N] (on the CPU)."""
    generator = torch.Generator().manual_seed(0)
    lead = min(steps + 1, length // 4)  # no peer's shift across documents can then change the work
    mask = torch.cat([supervised_spans(share, length, lead, generator) for _ in range(documents)])
    ids = torch.randint(0, sizes.vocab, (documents * length,), generator=generator)
    on = torch.Generator(device).manual_seed(0)
    aux = torch.randn(len(ids), 3 * sizes.hidden, generator=on, device=device, dtype=dtype)
    last = torch.randn(len(ids), sizes.hidden, generator=on, device=device)
    last = (last * last.square().mean(-1, keepdim=True).rsqrt()).to(dtype)  # RMS 1: a norm of ones changes nothing
    return ids.to(device), aux, last, mask


def batch(sizes: Sizes, share: float, documents: int, length: int, steps: int, device: str, dtype: torch.dtype):
    """The same rows as eyas reads them."""
    ids, aux, last, mask = rows(sizes, share, documents, length, steps, device, dtype)
    start = (torch.arange(documents) * length).repeat_interleave(length)
    return TrainBatch(ids, aux, last[mask.to(device)], mask, start, start + length)


class RandomTarget:
    """What a draft reads of a target: embedding, lm_head, final norm of ones."""

    def __init__(self, sizes: Sizes, device: str, dtype: torch.dtype):
        generator = torch.Generator(device).manual_seed(1)
        shape = (sizes.vocab, sizes.hidden)
        self.embedding = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        self.head = torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(
            1.3 * sizes.hidden**-0.5
        )
        self.norm = FinalNorm(torch.ones(sizes.hidden, device=device, dtype=dtype), sizes.eps)

    def embed_tokens(self) -> Tensor:
        return self.embedding

    def lm_head(self) -> Tensor:
        return self.head

    def final_norm(self) -> FinalNorm:
        return self.norm


def draft_ids(sizes: Sizes) -> Tensor:
    """[Vd] the target ids of the draft vocabulary, ascending."""
    chosen = torch.randperm(sizes.vocab, generator=torch.Generator().manual_seed(1))[: sizes.draft_vocab]
    return chosen.sort().values


def draft(sizes: Sizes, target: RandomTarget, device: str, train_lm_head: bool) -> Eagle3DraftModel:
    config = Eagle3DraftConfig(
        hidden_size=sizes.hidden,
        target_hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab,
        draft_vocab_size=sizes.draft_vocab,
        aux_layers=(2, 16, 29),
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        max_position_embeddings=131072,
        rms_norm_eps=sizes.eps,
        train_lm_head=train_lm_head,
    )
    ids = draft_ids(sizes)
    t2d = torch.zeros(sizes.vocab, dtype=torch.bool).index_fill_(0, ids, True)
    torch.manual_seed(2)
    model = Eagle3DraftModel(config, t2d, ids - torch.arange(len(ids))).to(device)
    model.load_target(target)  # type: ignore[arg-type]
    with torch.no_grad():
        model.lm_head.weight.copy_(model.target_lm_head.float() + 0.01 * torch.randn_like(model.lm_head.weight))
    return model
