"""The target, run by transformers."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import EyasError
from eyas.kernels.few_rows import use_few_rows
from eyas.progress import console
from eyas.target.spec import TargetSpec, check_aux_layers
from eyas.target.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Captured:
    """A sample's states, CPU, in the model's dtype: aux [T, A, H] low to high, last [T, H] PRE final norm."""

    aux: Tensor
    last: Tensor


class Target:
    """A loaded target. `.model` is the transformers causal LM, in eval mode and without gradients."""

    def __init__(self, model: nn.Module, spec: TargetSpec, trust_remote_code: bool = False):
        self.model: Any = model.eval().requires_grad_(False)
        self.spec, self.trust_remote_code = spec, trust_remote_code
        self.decoder, self.blocks = _decoder(model, spec)
        use_few_rows(model)

    @classmethod
    def load(
        cls,
        spec: TargetSpec,
        dtype: str = "auto",
        device: str = "cpu",
        attention: str = "sdpa",
        trust_remote_code: bool = False,
    ) -> "Target":
        """dtype "auto": the checkpoint's own on a GPU, float32 on a CPU. Raises EyasError where it cannot load."""
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        if console.quiet or not sys.stderr.isatty():
            disable_progress_bar()
        kind = dtype if dtype != "auto" else "float32" if device == "cpu" else spec.dtype
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                spec.path,
                output_loading_info=True,
                dtype=getattr(torch, kind),
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
            )
        except (ImportError, ValueError, KeyError) as e:
            hint = f"target.attention is {attention}; models with code of their own need target.trust_remote_code"
            raise EyasError(f"{spec.path}: transformers cannot load the target: {e}", hint) from e
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise EyasError(f"{spec.path}: {len(missing)} weights are not in the shards: {', '.join(missing[:6])}")
        return cls(model.to(device), spec, trust_remote_code)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.spec, self.trust_remote_code)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @cached_property
    def cache_argument(self) -> str:
        """Name of the KV cache argument of `model(...)`: transformers renames it in the course of version 5."""
        return "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    @torch.no_grad()
    def capture(self, batch: list[list[int]], aux_layers: list[int]) -> list[Captured]:
        """States of each sample at the boundaries `aux_layers`, and at boundary L, which enters the final norm.

        Boundary i is the input of block i; boundary L the output of the last block. A batch gives the states that
        its samples have alone. lm_head is not computed. Raises EyasError for unfit layers or samples.
        """
        last, width = self.spec.num_layers, max(map(len, batch))
        # Padding stands on the right, where no real token of a causal decoder sees it: no mask is needed, and
        # attention takes the same fast causal path for a batch as for a sample alone.
        padded = [[*ids, *[ids[-1]] * (width - len(ids))] for ids in batch]
        with self.boundaries({*check_aux_layers(aux_layers, last), last}) as states:
            self.decoder(input_ids=torch.tensor(padded, device=self.device), use_cache=False)
        captured = []
        for row, ids in enumerate(batch):
            aux = torch.stack([states[i][row, : len(ids)] for i in aux_layers], 1)  # [T, A, H]
            captured.append(Captured(aux.cpu(), states[last][row, : len(ids)].to("cpu", copy=True)))
        return captured

    @contextmanager
    def boundaries(self, wanted: set[int]) -> Iterator[dict[int, Tensor]]:
        """Collect the boundary states [B, T, H] of one forward pass. The hooks go away whatever happens."""
        states: dict[int, Tensor] = {}
        last = len(self.blocks)

        def enter(index: int, _: nn.Module, args: tuple, kwargs: dict) -> None:
            states[index] = args[0] if args else kwargs["hidden_states"]

        def leave(_: nn.Module, __: tuple, output: Any) -> None:
            states[last] = output[0] if isinstance(output, tuple) else output

        inner = wanted - {last}
        handles = [self.blocks[i].register_forward_pre_hook(partial(enter, i), with_kwargs=True) for i in inner]
        handles.append(self.blocks[-1].register_forward_hook(leave))
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()


def _decoder(model: nn.Module, spec: TargetSpec) -> tuple[nn.Module, nn.ModuleList]:
    """The decoder and its blocks: the list of `num_layers` modules whose parent also holds the embedding."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    found = []
    for name, blocks in lists.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        embeddings = [m for m in parent.children() if isinstance(m, nn.Embedding)]
        if len(blocks) == spec.num_layers and any(m.num_embeddings >= spec.vocab_size for m in embeddings):
            found.append((parent, blocks))
    if len(found) != 1:
        seen = ", ".join(f"{name} ({len(blocks)})" for name, blocks in list(lists.items())[:6]) or "none"
        wanted = f"one decoder with an embedding of {spec.vocab_size} rows and a list of {spec.num_layers} blocks"
        raise EyasError(f"{spec.name}: expected {wanted}, found {len(found)}; module lists: {seen}")
    return found[0]
