"""The export stage: one folder for each layout, proved by reading it back as its engine would."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas import __version__
from eyas.draft.config import FLAGS, Eagle3DraftConfig
from eyas.draft.io import load_draft
from eyas.draft.model import Eagle3DraftModel
from eyas.errors import EyasError
from eyas.export import sglang, vllm
from eyas.export.verify import check, samples
from eyas.files import atomic, write_json, write_text
from eyas.pipeline import Context
from eyas.progress import say, warn
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights

LAYOUTS = {"vllm": vllm, "sglang": sglang}


def run(ctx: Context) -> dict[str, Any]:
    """Write `vllm/` and `sglang/` (config.json, weights, README.md) and verify each against the trained draft.

    Raises EyasError before writing anything for a draft that an engine would misread, and after writing for a
    folder that does not give the trained draft's logits.
    """
    config, draft_tokens = ctx.config, ctx.config.evaluate.draft_tokens
    spec = TargetSpec.load(config.target.model, config.target.revision)
    draft = load_draft(ctx.input("train"), TargetWeights(spec))
    if "sglang" in config.export.layouts:
        sglang.check(draft.config, spec)
    features = samples(ctx.input("extract"))
    origin = json.loads((ctx.input("train") / "draft.json").read_text())["provenance"]
    verified, warnings, tensors = {}, [], {}
    for layout in config.export.layouts:
        folder = ctx.out / layout
        tensors = write_layout(folder, layout, draft, spec, config.export.dtype, draft_tokens)
        card = model_card(layout, draft.config, spec, "PATH/OF/THIS/FOLDER", draft_tokens, origin)
        write_text(folder / "README.md", card)
        verified[layout] = checked = check(folder, spec, draft, features)
        if wrong := "; ".join(checked["findings"].messages("error")):
            raise EyasError(f"the {layout} export does not prove itself: {wrong}")
        apart = checked["proof"]["largest_difference"]
        say(f"{layout}: {len(tensors)} tensors; reloaded, logits within {apart:.1e} of the trained draft's")
        warnings += [f"{layout}: {message}" for message in checked["findings"].messages("warning")]
    for text in warnings:
        warn(text)
    counts = {"layouts": len(verified), "tensors": len(tensors), "bytes": sum(t.nbytes for t in tensors.values())}
    return {"counts": counts, "dtype": config.export.dtype, "verify": verified, "warnings": warnings}


def write_layout(
    folder: Path, layout: str, draft: Eagle3DraftModel, spec: TargetSpec, dtype: str, draft_tokens: int
) -> dict[str, Tensor]:
    """Write what an engine reads, config.json and model.safetensors; returns the tensors as they are stored."""
    module, kind = LAYOUTS[layout], getattr(torch, dtype)
    tensors = {n: t.to(kind) if t.is_floating_point() else t for n, t in draft.state_dict().items()}
    write_json(folder / "config.json", module.config(draft.config, spec, dtype, draft_tokens))
    named = {n.replace(vllm.LAYER, module.LAYER): t.contiguous() for n, t in tensors.items()}
    with atomic(folder / "model.safetensors") as temporary:
        save_file(named, temporary, {"format": "pt"})
    return tensors


def model_card(
    layout: str, draft: Eagle3DraftConfig, spec: TargetSpec, folder: str, draft_tokens: int, origin: dict[str, Any]
) -> str:
    """README.md: how to serve the draft with this layout's engine, what it is, where it comes from."""
    engine = {"vllm": "vLLM", "sglang": "SGLang"}[layout]
    command, options = LAYOUTS[layout].serving(spec.name, folder, draft_tokens)
    facts = {
        "method": "EAGLE-3, one layer; embeddings are the target's and not in this folder",
        "aux layers": f"{list(draft.aux_layers)} (boundaries: the state entering block i)",
        "draft vocabulary": f"{draft.draft_vocab_size:,} of the target's {draft.vocab_size:,} ids",
        "positions": f"{draft.max_position_embeddings:,}",
        "flags": ", ".join(flag for flag in FLAGS if getattr(draft, flag)) or "none",
        "target": f"{spec.name}, fingerprint {spec.fingerprint[:16]}",
        "made with": f"eyas {__version__}",
        **{f"training: {k}": v for k, v in origin.items() if k not in ("eyas", "target", "target_fingerprint")},
    }
    table = "\n".join(f"| {k} | {v} |" for k, v in facts.items())
    return f"""---
base_model: {spec.name}
tags: [eagle3, speculative-decoding]
---
# EAGLE-3 draft for {spec.name}, {engine} layout

With it, {engine} makes {spec.name} produce the same text in fewer passes.

```sh
{command.replace("$JSON", json.dumps(options))}
```

{"The value of --speculative-config:" if layout == "vllm" else "The same as arguments of sglang.Engine:"}

```json
{json.dumps(options, indent=2)}
```

{LAYOUTS[layout].NOTES.format(folder=folder)}

| | |
|---|---|
{table}
"""
