# ruff: noqa: E501  (a fault a line)
"""Faults of the config, the target's folder and the sources: found before anything runs."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eyas.config import RunConfig
from tests.preflight.faults import Fault, base, cut, edit_json, rows, said, setting, target, template
from tests.tiny import CHATML, make_target


def deep(*aux: int):
    """A target of 12 layers."""

    def spoil(config: RunConfig) -> RunConfig:
        folder = make_target(base(config) / "deep", layers=12)
        return setting(target={"model": str(folder)}, extract={"aux_layers": list(aux)})(config)

    return spoil


def without_eos(config: RunConfig) -> None:
    edit_json(Path(config.target.model) / "config.json", eos_token_id=None)
    edit_json(Path(config.target.model) / "generation_config.json", eos_token_id=None)


def weights(change):
    def spoil(config: RunConfig) -> None:
        path = Path(config.target.model) / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    return spoil


def quantised(tensors: dict[str, Any]) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.int8)


def no_template(config: RunConfig) -> None:
    (Path(config.target.model) / "chat_template.jinja").unlink()


def empty_file(config: RunConfig) -> None:
    (base(config) / "data.jsonl").write_text("")


def run_dir_is_a_file(config: RunConfig) -> RunConfig:
    (base(config) / "taken").write_text("")
    return config.model_copy(update={"run_dir": str(base(config) / "taken")})


def source_in_stage(config: RunConfig) -> RunConfig:
    path = Path(config.run_dir) / "prepare" / "mine.jsonl"
    path.write_text((base(config) / "data.jsonl").read_text())
    return setting(data={"sources": [str(path)]})(config)


def judged_on_training(config: RunConfig) -> RunConfig:
    return setting(evaluate={"prompts": config.data.sources})(config)


def long_rows(i: int, row: dict) -> dict:
    row["messages"][1]["content"] *= 40
    return row


def called(i: int, row: dict) -> dict:
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    row["messages"][1] = {"role": "assistant", "content": "", "tool_calls": [call]}
    return row


def role_of(name: str):
    def change(i: int, row: dict) -> dict:
        row["messages"][0]["role"] = name
        return row

    return change


LONG = {"data": {"max_length": 4096}}
UPPER = CHATML.replace("m['content']", "m['content'] | upper")
TRIM = CHATML.replace("m['content']", "m['content'] | trim")
THINK = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")
TWICE = "<|im_start|><|im_start|>" + CHATML


def thinking(config: RunConfig) -> RunConfig:
    rows(said("<think>it is the river</think>the river"))(config)
    return template(THINK)(config)


def trimmed(config: RunConfig) -> RunConfig:
    rows(said("the river  "))(config)
    return template(TRIM)(config)


def long_in_config(config: RunConfig) -> RunConfig:
    return setting(**LONG)(rows(long_rows)(config))


def plain(**sections: Any):
    """Answers as they are in the data, and other settings."""
    return setting(regenerate={"mode": "none"}, **sections)


ROPE = {"rope_type": "linear", "rope_theta": 10000.0}
SET_AUX, MODEL_CARD = "set extract.aux_layers", "model's card"
# fmt: off
FAULTS = [
    Fault("an aux layer beyond the target", "config", setting(extract={"aux_layers": [1, 3, 9]}), "aux layers [1, 3, 9] do not fit a target of 6 layers", SET_AUX),
    Fault("an aux layer twice", "config", setting(extract={"aux_layers": [1, 3, 3]}), "aux layers [1, 3, 3] do not fit", SET_AUX),
    Fault("aux layers high to low", "config", setting(extract={"aux_layers": [5, 3, 1]}), "aux layers [5, 3, 1] do not fit", SET_AUX),
    Fault("default aux layers of too few layers", "config", setting(extract={"aux_layers": None}), "aux layers [2, 3, 3] do not fit a target of 6 layers", SET_AUX),
    Fault("aux layers in SGLang's numbering", "config", deep(1, 5, 8), "extract.aux_layers [1, 5, 8] look like SGLang's numbering", "[2, 6, 9]", "warning"),
    Fault("aux layers a block late", "config", deep(3, 7, 10), "[3, 7, 10] are one block later than every server's default [2, 6, 9]", "leave extract.aux_layers out", "warning"),
    Fault("the embedding as an aux layer", "config", deep(0, 6, 9), "boundary 0 is the embedding", "[2, 6, 9]", "warning"),
    Fault("key/value heads that do not divide", "config", setting(draft={"num_key_value_heads": 3}), "4 query heads cannot share 3 key/value heads evenly", "draft.num_key_value_heads"),
    Fault("an odd head_dim", "config", setting(draft={"head_dim": 7}), "head_dim 7 is odd", "draft.head_dim"),
    Fault("two norms that exclude each other", "config", setting(draft={"norm_before_fc": True, "fc_norm": True}), "norm_before_fc and fc_norm exclude each other", "draft."),
    Fault("a flag that SGLang cannot serve", "config", setting(draft={"norm_before_residual": True}), "SGLang has no norm_before_residual", "set export.layouts to [vllm]"),
    Fault("an unknown RoPE type", "config", target(rope_parameters=ROPE | {"rope_type": "spiral"}), "'rope_type': 'spiral'", "rope_parameters"),
    Fault("a scaled RoPE without its factor", "config", target(rope_parameters=ROPE), "RoPE of type linear cannot be made", MODEL_CARD),
    Fault("no rope_theta", "config", target(rope_parameters=None, rope_theta=None), "config.json: neither `rope_theta`", "a rotary base is never guessed"),
    Fault("RoPE for sliding layers alone", "config", target(rope_parameters={"sliding_attention": ROPE}), "none for full_attention to follow", MODEL_CARD),
    Fault("a target with LayerNorm", "config", target(rms_norm_eps=None, layer_norm_eps=1e-5), "uses LayerNorm", "RMSNorm"),
    Fault("a vocabulary of another size", "config", target(vocab_size=352), "model.embed_tokens.weight is [320, 32], config.json says [352, 32]", "of different models"),
    Fault("a hidden size of another model", "config", target(hidden_size=64), "model.embed_tokens.weight is [320, 32], config.json says [320, 64]", "of different models"),
    Fault("a head that is nowhere", "config", target(tie_word_embeddings=False), "no lm_head.weight in the shards, and tie_word_embeddings is false", "fetch the missing shard"),
    Fault("no end-of-turn token", "config", without_eos, "names no eos_token_id", "generation_config.json"),
    Fault("an end-of-turn token beyond the vocabulary", "config", lambda c: edit_json(Path(c.target.model) / "generation_config.json", eos_token_id=400), "eos_token_id [400] is beyond the target's vocabulary of 320", "of another model"),
    Fault("a truncated shard of the target", "config", cut("target/model.safetensors", 64), "model.safetensors has", "Fetch the model again"),
    Fault("a quantised embedding", "config", weights(quantised), "model.embed_tokens.weight is quantised (I8)", "unquantised"),
    Fault("a target in float16 that was trained in bfloat16", "config", lambda c: (target(dtype="bfloat16")(c), setting(target={"dtype": "float16"})(c))[1], "target.dtype is float16, the checkpoint is bfloat16", "bfloat16 or auto", "warning"),
    Fault("a folder that is no target", "config", setting(target={"model": "./nowhere"}), "target './nowhere' is not a folder", "set target.model"),
    Fault("a GPU that is not there", "config", setting(device="cuda"), "torch sees no GPU", "--device cpu"),
    Fault("no layout to export", "config", setting(export={"layouts": []}), "export.layouts is empty", "set vllm or sglang", "warning"),
    Fault("no source", "config", setting(data={"sources": []}), "data.sources is empty", "name JSONL"),
    Fault("a source that is not there", "config", setting(data={"sources": ["nowhere.jsonl"]}), "'nowhere.jsonl' matches no file", "give a file"),
    Fault("an empty source", "config", empty_file, "data.jsonl is empty (0 bytes)", "write it again"),
    Fault("prompts that were trained on", "config", judged_on_training, "evaluate.prompts names", "take the file out"),
    Fault("a source in a stage's folder", "config", source_in_stage, "lies in this run's own prepare folder", "move it out"),
    Fault("a run folder that is a file", "config", run_dir_is_a_file, "taken is a file", "name a folder"),
    Fault("no chat template", "config", no_template, "the tokenizer has no chat template", "instruct model"),
    Fault("a template that upper-cases", "config", template(UPPER), "data.jsonl row 1: the chat template does not render assistant turn 2", "a template that edits text"),
    Fault("a template that upper-cases prompts to be answered", "config", lambda c: (template(UPPER)(c), c)[1], "does not render user turn 1 verbatim", "a template that edits text"),
    Fault("a template that trims", "config", trimmed, "does not render assistant turn 2 verbatim", "a template that edits text"),
    Fault("a template that removes think blocks", "config", thinking, "does not render assistant turn 2", "a template that edits text"),
    Fault("a template that writes two begin tokens", "config", template(TWICE), "begin with two begin tokens ('<|im_start|>')", "let the chat template write one", "warning"),
    Fault("tool calls that the template drops", "config", rows(called), "call of weather is left out", "mend the rows"),
    Fault("empty answers", "config", rows(said("")), "data.jsonl row 1: assistant turn 2 has neither content nor tool_calls", "mend the rows"),
    Fault("one empty answer", "config", rows(lambda i, r: said("")(i, r) if i == 2 else r), "1 of 12 sampled rows cannot become samples: data.jsonl row 3: assistant turn 2", "mend the rows", "warning"),
    Fault("a role that nobody knows", "config", rows(role_of("wizard")), "turn 1: unknown role 'wizard'", "mend the rows"),
    Fault("lines that are not JSON", "config", rows(lambda i, r: "{" + json.dumps(r)), "data.jsonl row 1: not valid JSON", "mend the rows"),
    Fault("special tokens as text", "config", rows(said("the <|im_end|> river")), "assistant turn 2 holds the special token '<|im_end|>' as text", "mend the rows"),
    Fault("samples too short for an answer", "config", plain(data={"max_length": 8}), "no sampled answer begins within data.max_length 8", "raise it"),
    Fault("samples longer than the positions", "config", long_in_config, "tokens, the target 256 positions", "set data.max_length to 256 or less"),
    Fault("answers that leave no room", "config", setting(regenerate={"max_new_tokens": 200}), "regenerate.max_new_tokens 200 leaves no room", "raise data.max_length", "warning"),
    Fault("a learning rate of 10", "config", setting(train={"lr": 10.0}), "train.lr 10 would destroy the draft", "1e-4 to 1e-3"),
    Fault("a learning rate of nothing", "config", setting(train={"lr": 1e-9}), "train.lr 1e-09 is far from", "1e-4 to 1e-3", "warning"),
    Fault("a moment of 1", "config", setting(train={"betas": [0.9, 1.0]}), "train.betas [0.9, 1.0]", "[0.9, 0.95]"),
    Fault("moments in the wrong order", "config", setting(train={"betas": [0.99, 0.9]}), "train.betas [0.99, 0.9] are in the wrong order", "[0.9, 0.95]", "warning"),
    Fault("a warm-up without an end", "config", setting(train={"warmup": 1.0}), "train.warmup 1 makes the whole run a warm-up", "it is a share", "warning"),
    Fault("an evaluation that never comes", "config", setting(train={"eval_every": 1000}), "train.eval_every 1000 never fires: the run has about", "lower it", "warning"),
    Fault("a checkpoint that never comes", "config", setting(train={"checkpoint_every": 50, "max_steps": 20}), "train.checkpoint_every 50 never fires", "lower it", "warning"),
    Fault("a batch larger than the data", "config", setting(train={"accumulation": 64}), "train.accumulation 64), all training data have", "lower them", "warning"),
    Fault("nothing held out", "config", setting(data={"heldout": 0.0}), "data.heldout is 0", "set it to 0.05", "warning"),
    Fault("nearly all held out", "config", setting(data={"heldout": 0.95}), "data.heldout 0.95 keeps most of the data from training", "0.05", "warning"),
]
# fmt: on
