import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eyas.errors import EyasError
from eyas.target.spec import TargetSpec
from eyas.target.weights import TargetWeights
from tests.target.families import FAMILIES, save_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


def rewrite(source: Path, folder: Path, change) -> TargetWeights:
    """A copy of the folder whose tensors are what `change` makes of them."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")
    return TargetWeights(TargetSpec.load(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_equal_those_of_the_loaded_model(tmp_path, family):
    weights = TargetWeights(TargetSpec.load(save_model(tmp_path, family)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(weights.embed_tokens(), model.get_input_embeddings().weight)
    assert torch.equal(weights.lm_head(), model.get_output_embeddings().weight)
    assert torch.equal(weights.final_norm().weight, model.model.norm.weight)
    layer = weights.layer(3)
    assert torch.equal(layer["self_attn.o_proj.weight"], model.model.layers[3].self_attn.o_proj.weight)
    assert not any(".experts." in name for name in layer)


def test_shards_with_an_index_and_without_read_as_a_single_file(llama, tmp_path):
    expected = TargetWeights(TargetSpec.load(llama)).fingerprint()
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    weights = TargetWeights(TargetSpec.load(sharded))
    assert weights.fingerprint() == expected and len(weights.layer(0)) == 9
    (sharded / "model.safetensors.index.json").unlink()
    assert TargetWeights(TargetSpec.load(sharded)).fingerprint() == expected


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model."])
def test_other_prefixes_are_found_and_a_vision_tower_is_not_mistaken(llama, tmp_path, prefix):
    def change(tensors):
        renamed = {k.replace("model.", prefix, 1) if k.startswith("model.") else k: v for k, v in tensors.items()}
        tower = {f"vision_tower.layers.{i}.norm1.weight": torch.ones(8) for i in range(4)}
        # a multi-token-prediction block behind the decoder has an embedding and a norm of its own
        extra = {f"{prefix}layers.4.embed_tokens.weight": torch.zeros(96, 32)}
        return renamed | tower | extra | {f"{prefix}layers.4.shared_head.norm.weight": torch.zeros(32)}

    weights, plain = rewrite(llama, tmp_path / "other", change), TargetWeights(TargetSpec.load(llama))
    assert weights.prefix == prefix
    assert torch.equal(weights.embed_tokens(), plain.embed_tokens())
    assert weights.fingerprint() == plain.fingerprint()
    assert weights.layer(2).keys() == plain.layer(2).keys()


def test_an_unknown_naming_lists_close_names(llama, tmp_path):
    def change(tensors):
        return {k.replace("model.layers", "transformer.h"): v for k, v in tensors.items()}

    with pytest.raises(EyasError, match=r"found none; close names: .*model\.norm\.weight.*embed_tokens"):
        rewrite(llama, tmp_path / "other", change).embed_tokens()


def test_an_absent_head_of_an_untied_target_is_an_error(llama, tmp_path):
    weights = rewrite(llama, tmp_path / "x", lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"})
    with pytest.raises(EyasError, match=r"lm_head\.weight, and tie_word_embeddings is false"):
        weights.lm_head()


def test_tied_targets_store_either_tensor(llama, tmp_path):
    tied = save_model(tmp_path / "tied", "llama", tie_word_embeddings=True)
    weights = TargetWeights(TargetSpec.load(tied))
    assert torch.equal(weights.lm_head(), weights.embed_tokens())

    def only_head(tensors):
        return {k.replace("model.embed_tokens", "lm_head"): v for k, v in tensors.items()}

    other = rewrite(tied, tmp_path / "head", only_head)
    assert torch.equal(other.embed_tokens(), weights.embed_tokens())


def test_what_the_config_does_not_say_about_tying_the_shards_do(llama, tmp_path):
    for folder, tied in ((llama, False), (save_model(tmp_path / "t", "llama", tie_word_embeddings=True), True)):
        copy = tmp_path / f"copy{tied}"
        shutil.copytree(folder, copy)
        config = json.loads((copy / "config.json").read_text())
        del config["tie_word_embeddings"]
        (copy / "config.json").write_text(json.dumps(config))
        assert TargetSpec.load(copy).tie_word_embeddings is tied


def test_a_tensor_of_another_shape_than_the_config_says_is_named(llama, tmp_path):
    weights = rewrite(llama, tmp_path / "x", lambda t: t | {"model.embed_tokens.weight": torch.zeros(90, 32)})
    with pytest.raises(EyasError, match=r"embed_tokens.weight is \[90, 32\], config.json says \[96, 32\]"):
        weights.embed_tokens()


def test_a_truncated_shard_names_file_and_sizes(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "x")
    shard = tmp_path / "x" / "model.safetensors"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(EyasError, match=f"{size - 10} bytes, its header says {size}"):
        TargetSpec.load(tmp_path / "x")


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", b"\x02" + b"\0" * 7 + b"[]"]
)
def test_a_file_that_is_no_safetensors_is_named(llama, tmp_path, content):
    shutil.copytree(llama, tmp_path / "x")
    (tmp_path / "x" / "model.safetensors").write_bytes(content)
    with pytest.raises(EyasError, match="no readable safetensors header"):
        TargetSpec.load(tmp_path / "x")


def test_a_shard_named_in_the_index_but_absent_is_named(llama, tmp_path):
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path, max_shard_size="20KB")
    first = min(tmp_path.glob("*.safetensors"))
    first.unlink()
    with pytest.raises(EyasError, match=first.name):
        TargetSpec.load(tmp_path)


def test_a_folder_without_weights_says_so(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "x")
    (tmp_path / "x" / "model.safetensors").unlink()
    with pytest.raises(EyasError, match=r"no \*.safetensors file"):
        TargetSpec.load(tmp_path / "x")


def test_scaled_logits_are_refused_and_capped_ones_told_of(llama, tmp_path, capsys):
    shutil.copytree(llama, tmp_path / "x")
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "x" / "config.json").write_text(json.dumps(config | {"logits_scaling": 8.0}))
    with pytest.raises(EyasError, match="logits_scaling"):
        TargetSpec.load(tmp_path / "x")
    (tmp_path / "x" / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    TargetSpec.load(tmp_path / "x")
    assert "caps its logits at 30" in capsys.readouterr().err
