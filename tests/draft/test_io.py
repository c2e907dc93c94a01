import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.draft import load_draft, save_draft
from eyas.errors import EyasError
from tests.draft import reference


@pytest.mark.parametrize("settings", [{}, {"vocab": 320, "norm_before_fc": True, "train_lm_head": True}])
def test_a_saved_draft_comes_back_whole(make_draft, make_documents, target, tmp_path, settings):
    model = make_draft(dtype=torch.float32, **settings)
    save_draft(model, tmp_path, {"target": "tiny"})
    again = load_draft(tmp_path, target[1])
    assert again.config == model.config and not again.training
    assert json.loads((tmp_path / "draft.json").read_text())["provenance"] == {"target": "tiny"}
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b) and a.requires_grad == b.requires_grad, name
    batch = reference.pack(make_documents([[False, True, True, True]]))
    losses = [m(batch=batch, ttt_steps=2, ttt_step_loss_decay=1.0).loss for m in (model, again)]
    assert losses[0] == losses[1]


def test_missing_unexpected_and_misshapen_tensors_are_all_listed(make_draft, target, tmp_path):
    save_draft(make_draft(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["fc.bias"] = torch.zeros(32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:8].clone()
    del tensors["norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EyasError) as caught:
        load_draft(tmp_path, target[1])
    for fault in ("missing norm.weight", "unexpected fc.bias", "lm_head.weight is [8, 32], expected [64, 32]"):
        assert fault in str(caught.value)


def test_what_is_no_draft_is_refused(make_draft, target, tmp_path):
    with pytest.raises(EyasError, match=r"draft.json cannot be read"):
        load_draft(tmp_path, target[1])
    save_draft(make_draft(), tmp_path)
    whole = json.loads((tmp_path / "draft.json").read_text())
    (tmp_path / "draft.json").write_text(json.dumps({k: v for k, v in whole.items() if k != "method"}))
    with pytest.raises(EyasError, match="'method': None"):
        load_draft(tmp_path, target[1])
    (tmp_path / "draft.json").write_text(json.dumps(whole))
    with open(tmp_path / "model.safetensors", "r+b") as f:
        f.truncate(1000)
    with pytest.raises(EyasError, match=r"model.safetensors cannot be read"):
        load_draft(tmp_path, target[1])
