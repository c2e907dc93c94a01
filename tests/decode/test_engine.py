"""Speculative decoding gives plain greedy decoding's tokens, in the rounds of a reference without caches."""

import pytest
import torch

from eyas.decode.engine import compare, plain_decode, speculative_decode
from eyas.errors import EyasError
from eyas.export.vllm import layer_config
from eyas.target.backend import Target
from eyas.target.spec import TargetSpec
from tests.decode.conftest import make_draft
from tests.export.engine import engine_logits

PROMPTS = [[5, 17, 200, 9], [1], list(range(40, 75)), [7, 7, 7, 7, 7, 7]]


@torch.no_grad()
def naive(target, draft, prompt, new_tokens, draft_tokens):
    """(tokens, rounds) with every state computed anew from the start, draft rows by the engines' definition."""
    config, model, ids, rounds = draft.config, target.model, list(prompt), []

    def states():
        out = model(torch.tensor([ids]), output_hidden_states=True)
        aux = target.capture([ids], list(config.aux_layers))[0].aux
        return aux.flatten(1), out.logits[0].argmax(-1).tolist()

    aux, own = states()
    ids.append(own[-1])
    while ids[-1] not in target.spec.eos_token_ids and len(ids) < len(prompt) + new_tokens:
        chain = []
        for _ in range(draft_tokens):
            logits = engine_logits(
                layer_config(config), vars(config), draft.state_dict(), draft.embed_tokens, aux, ids[1:] + chain
            )
            chain.append(int(draft.to_target_ids(logits[-1].argmax())))
        known = len(ids)
        ids += chain
        _, own = states()
        accepted = next((k for k, token in enumerate(chain) if own[known - 1 + k] != token), draft_tokens)
        ids[known:] = [*chain[:accepted], own[known - 1 + accepted]]
        ends = [i + 1 for i in range(known, len(ids)) if ids[i] in target.spec.eos_token_ids]
        ids = ids[: min([*ends, len(prompt) + new_tokens])]
        rounds.append(min(accepted, len(ids) - known))
        last = ids.pop()
        aux, _ = states()
        ids.append(last)
    return ids[len(prompt) :], rounds


@pytest.mark.parametrize("kind", ["random", "target", "repeat"])
@pytest.mark.parametrize("draft_tokens", [1, 3, 5])
def test_output_equals_plain_greedy_decoding(target, kind, draft_tokens):
    draft = make_draft(target.spec, kind, vocab=100 if kind == "target" else 320)
    for prompt in PROMPTS:
        plain = plain_decode(target, prompt, 20)
        drafted = speculative_decode(target, draft, prompt, 20, draft_tokens)
        assert compare(target, prompt, plain.token_ids, drafted.token_ids) == {"verdict": "identical"}
        assert len(plain.token_ids) == 20 and all(0 <= a <= draft_tokens for a in drafted.rounds)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"norm_before_residual": True, "norm_output": True},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True, "head_dim": 16, "num_key_value_heads": 4},
    ],
)
def test_rounds_are_those_of_a_reference_that_keeps_no_cache(folders, shape):
    accepted = 0
    for seed in (1, 2):
        target = Target.load(TargetSpec.load(folders(seed)))
        draft = make_draft(target.spec, "target", **shape)
        for prompt in PROMPTS[:3]:
            drafted = speculative_decode(target, draft, prompt, 12, 3)
            assert (drafted.token_ids, drafted.rounds) == naive(target, draft, prompt, 12, 3)
            accepted += sum(drafted.rounds)
    assert accepted  # else only the first pass of a round was tested


def test_each_round_is_one_pass_of_the_target(target):
    passes = []
    hook = target.model.register_forward_hook(lambda _m, _i, out: passes.append(out.logits.shape[1]))
    try:
        drafted = speculative_decode(target, make_draft(target.spec, "repeat"), [5, 17], 12, 3)
        assert passes == [1] + [4] * len(drafted.rounds)
    finally:
        hook.remove()


def test_an_accepted_end_of_turn_token_ends_the_answer_within_a_round(target, monkeypatch):
    draft = make_draft(target.spec, "repeat")
    prompt = next(
        p
        for p in ([i, i + 1] for i in range(3, 300))
        if speculative_decode(target, draft, p, 12, 3).rounds[-1] == 3
    )
    whole = speculative_decode(target, draft, prompt, 12, 3)
    stop = whole.token_ids[-1]
    first = whole.token_ids.index(stop) + 1
    monkeypatch.setitem(target.spec.__dict__, "eos_token_ids", [stop])
    drafted = speculative_decode(target, draft, prompt, 12, 3)
    assert drafted.token_ids == plain_decode(target, prompt, 12).token_ids == whole.token_ids[:first]


@pytest.mark.parametrize("new_tokens", [1, 2, 7])
def test_never_more_than_max_new_tokens(target, new_tokens):
    drafted = speculative_decode(target, make_draft(target.spec, "repeat"), [3, 4], new_tokens, 4)
    assert len(drafted.token_ids) == new_tokens
    assert (new_tokens == 1) == (drafted.rounds == [])


def test_the_last_position_ends_the_answer_and_no_pass_goes_beyond_it(target):
    limit, passes = target.spec.max_position_embeddings, []
    hook = target.model.register_forward_pre_hook(
        lambda _m, _a, kw: passes.append(kw["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        prompt = [3 + i % 300 for i in range(limit - 9)]
        drafted = speculative_decode(target, make_draft(target.spec, "repeat"), prompt, 100, 4)
    finally:
        hook.remove()
    assert drafted.token_ids == plain_decode(target, prompt, 100).token_ids
    assert len(prompt) + len(drafted.token_ids) == limit
    for i, passed in enumerate(passes[1:]):
        known = len(prompt) + 1 + sum(a + 1 for a in drafted.rounds[:i])
        assert known - 1 + passed <= limit


@pytest.mark.parametrize("length", [0, 256, 300])
def test_a_prompt_without_room_for_an_answer_is_refused(target, length):
    for decode in (
        lambda p: plain_decode(target, p, 4),
        lambda p: speculative_decode(target, make_draft(target.spec, "random"), p, 4, 3),
    ):
        with pytest.raises(EyasError, match=f"the prompt has {length} tokens; the models read 1 to 255"):
            decode([5] * length)


def test_the_drafts_own_limit_counts_too(target):
    draft = make_draft(target.spec, "random")
    object.__setattr__(draft.config, "max_position_embeddings", 64)
    with pytest.raises(EyasError, match="100 tokens; the models read 1 to 63"):
        speculative_decode(target, draft, [5] * 100, 4, 3)


def test_parting_at_equal_logits_is_a_tie_and_elsewhere_an_error(folders, tmp_path):
    target = Target.load(TargetSpec.load(folders(2)))
    answer = plain_decode(target, [5, 17], 6).token_ids
    chosen, twin = answer[3], next(i for i in range(3, 320) if i not in answer)
    weight = target.model.get_input_embeddings().weight
    weight[twin] = weight[chosen]
    plain = plain_decode(target, [5, 17], 6).token_ids
    at = plain.index(min(chosen, twin))
    parted = [*plain[:at], max(chosen, twin), *plain[at + 1 :]]
    found = compare(target, [5, 17], plain, parted)
    assert found["verdict"] == "tie" and found["position"] == at and found["gap"] <= found["tolerance"] < 1e-3
    wrong = [*plain[:at], next(i for i in range(3, 320) if i not in (chosen, twin)), *plain[at + 1 :]]
    assert compare(target, [5, 17], plain, wrong)["verdict"] == "different"
    assert compare(target, [5, 17], plain, plain[:-1]) == {"verdict": "different", "position": 5}


def test_half_precision_parts_at_ties_only(folders):
    target = Target.load(TargetSpec.load(folders(1)), dtype="bfloat16")
    draft = make_draft(target.spec, "target").to(torch.bfloat16)
    for prompt in PROMPTS:
        plain, drafted = plain_decode(target, prompt, 24), speculative_decode(target, draft, prompt, 24, 3)
        assert compare(target, prompt, plain.token_ids, drafted.token_ids)["verdict"] != "different"


@pytest.mark.slow
def test_real_target_float32_outputs_are_identical(smollm2, smollm2_tokenizer):
    target = Target.load(TargetSpec.load(smollm2))
    draft = make_draft(target.spec, "target")
    for text in ("Name three fruits.", "Write a haiku about rain."):
        prompt = smollm2_tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        plain, drafted = plain_decode(target, prompt, 24), speculative_decode(target, draft, prompt, 24, 3)
        assert compare(target, prompt, plain.token_ids, drafted.token_ids)["verdict"] == "identical"
