"""Config: does the draft that is asked for fit the target? From headers and JSON alone, before anything is run."""

from collections.abc import Iterator

import torch

from eyas.draft.config import Eagle3DraftConfig
from eyas.draft.layers import Rope
from eyas.errors import EyasError
from eyas.export import sglang
from eyas.preflight.finding import Check, Finding, Subject, error, info, warning
from eyas.target.spec import check_aux_layers

FLOATS = {"F64", "F32", "F16", "BF16"}


def target_can_be_used(s: Subject) -> Iterator[Finding]:
    spec, shards, device = s.spec, s.weights.shards, s.config.torch_device()
    heads = f"{spec.num_attention_heads}/{spec.num_key_value_heads} heads of {spec.head_dim}"
    text = f"{spec.model_type} of {spec.num_layers} layers, hidden size {spec.hidden_size}, {heads}, "
    tied = "tied to the embedding" if spec.tie_word_embeddings else "of its own"
    text += f"vocabulary {spec.vocab_size:,}, lm_head {tied}; runs on {device}"
    yield info(text, evidence={"path": str(spec.path)})
    head, prefix = shards.ending("lm_head.weight"), s.weights.prefix
    if not head and not spec.tie_word_embeddings:
        text = f"{spec.path}: no lm_head.weight in the shards, and tie_word_embeddings is false"
        yield error(text, "fetch the missing shard, or correct config.json")
    own = [n for n in (f"{prefix}embed_tokens.weight", f"{prefix}norm.weight", *head) if n in shards.where]
    for name in own:
        entry, rows = shards.where[name][1], [] if name.endswith("norm.weight") else [spec.vocab_size]
        if entry["shape"] != (wanted := [*rows, spec.hidden_size]):
            text = f"{spec.path}: {name} is {entry['shape']}, config.json says {wanted}"
            yield error(text, "config.json and weights are of different models")
        if entry["dtype"] not in FLOATS:
            text = f"{spec.path}: {name} is quantised ({entry['dtype']}): the draft shares it as it is"
            yield error(text, "use a checkpoint that keeps embedding, final norm and lm_head unquantised")
    if not spec.eos_token_ids:
        text = f"{spec.path} names no eos_token_id: no answer would end"
        level = "warning" if s.config.regenerate.mode == "none" else "error"
        yield Finding(level, text, "add eos_token_id to generation_config.json")
    elif beyond := [i for i in spec.eos_token_ids if i >= spec.vocab_size]:
        text = f"eos_token_id {beyond} is beyond the target's vocabulary of {spec.vocab_size}"
        yield error(text, "config.json or generation_config.json is of another model")
    asked, kind = s.config.target.dtype, spec.dtype
    if asked == "float16" and kind == "bfloat16":
        hint = "set target.dtype to bfloat16 or auto"
        yield warning("target.dtype is float16, the checkpoint is bfloat16: its states may overflow", hint)


def aux_layers_are_boundaries(s: Subject) -> Iterator[Finding]:
    count, aux = s.spec.num_layers, s.aux_layers  # the defaults collide, and raise, below 7 layers
    check_aux_layers(aux, count)
    default = [2, count // 2, count - 3]
    hint = f"eyas counts as vLLM does, by the block a state enters: those layers are {[i + 1 for i in aux]} here"
    if aux == [i - 1 for i in default]:
        yield warning(f"extract.aux_layers {aux} look like SGLang's numbering, the output of block i", hint)
    elif aux == [i + 1 for i in default]:
        text = f"extract.aux_layers {aux} are one block later than every server's default {default}"
        yield warning(text, "speculators 0.3 captured these; leave extract.aux_layers out for the usual ones")
    elif aux[0] == 0 or aux[-1] == count:
        what = "0 is the embedding, which the draft has" if aux[0] == 0 else f"{count} is the last state itself"
        yield warning(f"extract.aux_layers {aux}: boundary {what}", f"such as {default}")
    else:
        yield info(f"aux layers {aux}: the states entering these blocks of {count}")


def draft_fits(s: Subject) -> Iterator[Finding]:
    spec, config = s.spec, s.config
    shape = Eagle3DraftConfig.from_target(spec, config.draft, s.aux_layers, config.vocab.size)
    rope, kind = shape.rope_parameters, shape.rope_parameters["rope_type"]
    try:
        cos, sin = Rope(shape).table(8, torch.zeros(1))
    except (KeyError, TypeError, ValueError) as e:
        text = f"the target's RoPE of type {kind} cannot be made: {type(e).__name__} {e}; found {rope}"
        yield error(text, "complete rope_parameters in config.json from the model's card")
        return
    if not (cos.isfinite().all() and sin.isfinite().all()):
        yield error(f"the target's RoPE gives angles that are not finite: {rope}", "correct rope_theta and factor")
    heads, width = shape.num_attention_heads * shape.head_dim, shape.hidden_size
    wide = "" if heads == width else f", {heads} channels of attention for a hidden size of {width}"
    text = f"draft: {shape.num_attention_heads}/{shape.num_key_value_heads} heads of {shape.head_dim}{wide}, MLP"
    text += f" {shape.intermediate_size}, RoPE {kind} with base {rope['rope_theta']:g}"
    yield info(f"{text}, {shape.draft_vocab_size:,} ids", evidence=shape.to_dict())
    if "sglang" in config.export.layouts:
        try:
            sglang.check(shape, spec)
        except EyasError as e:  # found now, not by the export after the training
            yield error(e.message, e.hint)
    if not config.export.layouts:
        yield warning("export.layouts is empty: nothing that a server loads will be written", "set vllm or sglang")
    if config.evaluate.draft_tokens > config.train.ttt_steps:
        text = f"evaluate.draft_tokens {config.evaluate.draft_tokens} are more than train.ttt_steps"
        hint = "the draft was never trained that deep: raise ttt_steps, or accept fewer at the end"
        yield info(f"{text} {config.train.ttt_steps}", hint)


def lengths_fit(s: Subject) -> Iterator[Finding]:
    data, train, positions = s.config.data, s.config.train, s.spec.max_position_embeddings
    if data.max_length > positions:
        text = f"data.max_length {data.max_length} is beyond the target's {positions} positions"
        yield warning(text, f"samples that long would be noise: set it to {positions} or less")
    if train.batch_tokens < data.max_length:
        text = f"train.batch_tokens {train.batch_tokens} is less than data.max_length {data.max_length}"
        yield info(text, "longer samples are cut there when training")
    answer = s.config.regenerate.max_new_tokens
    if s.config.regenerate.mode != "none" and answer >= data.max_length:
        text = f"regenerate.max_new_tokens {answer} leaves no room for a prompt in data.max_length"
        yield warning(
            f"{text} {data.max_length}",
            "answers would be cut: raise data.max_length, or lower regenerate.max_new_tokens",
        )
    if s.config.evaluate.max_new_tokens >= positions:
        text = f"evaluate.max_new_tokens {s.config.evaluate.max_new_tokens} does not fit the target's {positions}"
        yield warning(f"{text} positions", "lower evaluate.max_new_tokens")


CHECKS = [
    Check("target", "config", (), target_can_be_used),
    Check("aux_layers", "config", ("target",), aux_layers_are_boundaries),
    Check("draft", "config", ("aux_layers",), draft_fits),
    Check("lengths", "config", ("target",), lengths_fit),
]
