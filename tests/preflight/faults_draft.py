# ruff: noqa: E501  (a fault a line)
"""Faults of the machine's room, the training itself and drafts to be served."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eyas.config import RunConfig
from eyas.export.export import write_layout
from eyas.preflight.finding import Subject
from tests.preflight.faults import Fault, base, setting


class Trial(Subject):
    """A run whose fresh draft is spoilt."""

    def __init__(self, config: RunConfig, change: Callable[[Any], Any]):
        super().__init__(config)
        change(self.trial)


def trial(change: Callable[[Any], Any]) -> Callable[[RunConfig], Subject]:
    return lambda config: Trial(config, change)


def put(draft: Any, name: str, value: float) -> None:
    tensors = dict(draft.named_parameters()) | dict(draft.named_buffers())
    with torch.no_grad():
        tensors[name].view(-1)[3] = value


def zero(draft: Any) -> None:
    with torch.no_grad():
        draft.fc.weight.zero_()


def loose(draft: Any) -> None:
    """A head that learns although it must not: the trial is trained, but what it may change was noted before."""
    forward = draft.forward

    def stray(**inputs: Any) -> Any:
        draft.target_lm_head.mul_(1.001)
        return forward(**inputs)

    draft.forward = stray


def cut_off(draft: Any) -> None:
    """A tensor that the forward pass no longer uses."""
    layer = draft.layers[0]
    kept = layer.mlp.down_proj.weight.detach().clone()
    layer.mlp.forward = lambda x: torch.nn.functional.linear(
        torch.nn.functional.silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x), kept
    )


def draft_folder(layout: str, change: Callable[[dict, dict], Any], target: bool = True):
    """An exported folder, its config.json and tensors passed through `change`; looked at alone."""

    def spoil(config: RunConfig) -> Subject:
        healthy, folder = Subject(config), base(config) / "draft"
        folder.mkdir()
        write_layout(folder, layout, healthy.trial, healthy.spec, "bfloat16", 3)
        about = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        change(about, tensors)
        (folder / "config.json").write_text(json.dumps(about))
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
        return Subject(draft=folder, target=config.target.model if target else None)

    return spoil


def cut_weights(config: RunConfig) -> Subject:
    subject = draft_folder("vllm", lambda c, t: None)(config)
    path = base(config) / "draft" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return subject


def layer(**values: Any):
    return lambda c, t: c["transformer_layer_config"].update(values)


def lacks(name: str):
    return lambda c, t: t.pop(name)


def has(name: str, like: str):
    return lambda c, t: t.update({name: t[like].clone()})


def not_a_number(c: dict, t: dict) -> None:
    t["fc.weight"][0, 0] = float("nan")


def absolute(c: dict, t: dict) -> None:
    t["d2t"] += torch.arange(len(t["d2t"]))


def wide(c: dict, t: dict) -> None:
    t["fc.weight"] = torch.cat([t["fc.weight"], t["fc.weight"][:, :32]], 1)


def served_by_blocks(c: dict, t: dict) -> None:
    c["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 3, 5]


def other_vocabulary(c: dict, t: dict) -> None:
    c["transformer_layer_config"]["vocab_size"] = 352
    t["t2d"] = torch.cat([t["t2d"], torch.zeros(32, dtype=torch.bool)])


def no_rope(c: dict, t: dict) -> None:
    for key in ("rope_theta", "rope_parameters"):
        del c["transformer_layer_config"][key]


HUGE = {"train": {"batch_tokens": 1 << 33}}
# fmt: off
FAULTS = [
    Fault("a batch that no memory holds", "model", setting(**HUGE), "GB are free on cpu", "set train.batch_tokens to "),
    Fault("NaN in the target's head", "model", trial(lambda d: put(d, "target_lm_head", float("nan"))), "target_lm_head [280, 32] has 1 values that are NaN or infinite", "fetch the target again"),
    Fault("memory as it was in the embedding", "model", trial(lambda d: put(d, "embed_tokens", float("inf"))), "embed_tokens [320, 32] has 1 values that are NaN or infinite", "fetch the target again"),
    Fault("a fresh tensor of zeros", "model", trial(zero), "fc.weight [32, 96] is all zero", "fetch the target again"),
    Fault("a loss that does not fall", "dry_run", setting(train={"lr": 1e-30}), "the loss does not fall: loss", "a lower train.lr"),
    Fault("a frozen tensor that moves", "dry_run", trial(loose), "training changed target_lm_head, which must stay as the target has it", "draft.train_lm_head"),
    Fault("a tensor that no gradient reaches", "dry_run", trial(cut_off), "reaches layers.0.mlp.down_proj.weight", "raise preflight.samples"),
    Fault("a cut draft", "deploy", cut_weights, "model.safetensors (", "export it again"),
    Fault("a tensor that is missing", "deploy", draft_folder("vllm", lacks("layers.0.hidden_norm.weight")), "layers.0.hidden_norm.weight [32] is missing: engines serve uninitialised memory", "export it again"),
    Fault("a tensor that is missing, for SGLang", "deploy", draft_folder("sglang", lacks("midlayer.mlp.up_proj.weight")), "layers.0.mlp.up_proj.weight [64, 32] is missing", "export it again"),
    Fault("a tensor that engines do not know", "deploy", draft_folder("vllm", has("verifier_norm.weight", "norm.weight")), "verifier_norm.weight is not part of this draft: vLLM refuses it", "export it again"),
    Fault("NaN in a draft", "deploy", draft_folder("vllm", not_a_number), "fc.weight has 1 values that are NaN or infinite", "export it again"),
    Fault("fc for more layers", "deploy", draft_folder("vllm", wide), "fc.weight: expected [32, 96], found [32, 128]", "export it again"),
    Fault("ids for offsets in a draft", "deploy", draft_folder("vllm", absolute), "d2t: draft row", "these are ids, not offsets"),
    Fault("no d2t", "deploy", draft_folder("vllm", lacks("d2t")), "d2t [280] is missing", "export it again"),
    Fault("a draft without a RoPE base", "deploy", draft_folder("vllm", no_rope), "rope_theta is missing: engines take what they find first", "write rope_theta"),
    Fault("a tied head", "deploy", draft_folder("vllm", layer(tie_word_embeddings=True)), "tie_word_embeddings is true", "export it again"),
    Fault("layers that engines count differently", "deploy", draft_folder("sglang", served_by_blocks), "vLLM would capture boundaries [1, 3, 5], SGLang [2, 4, 6]", "one less"),
    Fault("a flag that SGLang passes over", "deploy", draft_folder("sglang", lambda c, t: c.update(norm_before_residual=True)), "norm_before_residual is true: SGLang serves it as false", "export it again"),
    Fault("a flag that vLLM reads as true", "deploy", draft_folder("vllm", lambda c, t: c.pop("norm_before_residual")), "norm_before_residual is not written: true to vLLM", "export it again", "warning"),
    Fault("a draft of another vocabulary", "deploy", draft_folder("vllm", other_vocabulary), "vocab_size is 352, the target's 320", "export it again"),
    Fault("a draft of fewer positions", "deploy", draft_folder("vllm", layer(max_position_embeddings=64)), "max_position_embeddings is 64, the target's 256", "export it again", "warning"),
    Fault("a draft with another RoPE base", "deploy", draft_folder("vllm", lambda c, t: (layer(rope_theta=5e5)(c, t), c["transformer_layer_config"]["rope_parameters"].update(rope_theta=5e5))), "rope_theta is 500000.0, the target's 10000.0", "export it again", "warning"),
    Fault("a folder of no draft", "deploy", lambda c: Subject(draft=Path(c.target.model)), "is of no EAGLE-3 layout known here", "export it again"),
    Fault("a draft that is not there", "deploy", lambda c: Subject(draft=base(c) / "nowhere"), "nowhere is not a folder", "give a local folder"),
]
# fmt: on
