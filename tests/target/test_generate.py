import os
import random
from pathlib import Path

import pytest
import torch

from eyas.errors import EyasError
from eyas.target.backend import Target
from eyas.target.generate import generate
from eyas.target.spec import TargetSpec
from eyas.target.tokenizer import load_tokenizer
from tests.target.families import FAMILIES, save_model
from tests.tiny import make_target

REAL = Path(__file__).parents[2] / ".cache" / "SmolLM2-135M-Instruct"
# ten of the 96 ids end an answer: rows of a batch finish at different steps and leave it
EOS = list(range(2, 12))


def prompts_of(n: int, vocabulary: int = 96) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(12, vocabulary) for _ in range(rng.randrange(1, 20))] for _ in range(n)]


def load(folder: Path, family: str, **kwargs) -> Target:
    save_model(folder, family, eos_token_id=EOS, **kwargs)
    return Target.load(TargetSpec.load(folder), attention="eager" if family == "gpt_oss" else "sdpa")


def one_by_one(target: Target, prompt: list[int], tokens: int) -> list[int]:
    """What the library's own greedy generation says to a prompt alone."""
    ids = torch.tensor([prompt], device=target.device)
    with torch.no_grad():
        out = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=target.spec.eos_token_ids,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_the_library_s_one_by_one(tmp_path, family):
    target, prompts = load(tmp_path, family), prompts_of(9)
    answers = generate(target, prompts, 24, 0.0, 1.0, 0)
    assert answers == [one_by_one(target, p, 24) for p in prompts]
    assert len({len(a) for a in answers}) > 2  # rows did leave at different steps


def test_an_answer_ends_with_its_first_eos_or_at_the_limit(tmp_path):
    answers = generate(load(tmp_path, "llama"), prompts_of(12), 16, 0.0, 1.0, 0)
    for answer in answers:
        assert not set(answer[:-1]) & set(EOS)
        assert answer[-1] in EOS or len(answer) == 16
    assert {a[-1] in EOS for a in answers} == {True, False}


def test_an_answer_ends_where_the_target_s_window_does(tmp_path):
    target = load(tmp_path, "llama", max_position_embeddings=24)
    target.spec.eos_token_ids.clear()
    prompts = [[20] * 23, [30] * 10]
    assert [len(a) for a in generate(target, prompts, 20, 0.0, 1.0, 0)] == [1, 14]
    for bad in ([20] * 24, []):
        with pytest.raises(EyasError, match="expected 1 to 23"):
            generate(target, [[20], bad], 4, 0.0, 1.0, 0)


def test_sampled_answers_depend_on_seed_and_prompt_but_not_on_the_batch(tmp_path):
    target, prompts = load(tmp_path, "llama"), prompts_of(8)
    together = generate(target, prompts, 12, 1.0, 0.9, seed=5)
    assert generate(target, prompts[::-1], 12, 1.0, 0.9, seed=5)[::-1] == together
    assert [generate(target, [p], 12, 1.0, 0.9, seed=5)[0] for p in prompts] == together
    assert generate(target, prompts, 12, 1.0, 0.9, seed=6) != together
    assert generate(target, prompts, 12, 0.0, 1.0, seed=5) != together


def test_sampling_follows_the_distribution_and_the_nucleus(tmp_path):
    target, prompt = load(tmp_path, "llama"), [20, 30, 40]
    with torch.no_grad():
        probabilities = target.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    first = torch.tensor([generate(target, [prompt], 1, 1.0, 1.0, seed)[0][0] for seed in range(400)])
    seen = torch.bincount(first, minlength=96) / 400
    assert (seen - probabilities).abs().max() < 4 * 0.5 / 20  # four standard errors
    order = probabilities.sort(descending=True)
    inside = order.indices[: int((order.values.cumsum(0) < 0.5).sum()) + 1]
    nucleus = {generate(target, [prompt], 1, 1.0, 0.5, seed)[0][0] for seed in range(100)}
    assert nucleus <= set(inside.tolist()) and len(nucleus) > 1
    assert {generate(target, [prompt], 1, 1.0, 1e-6, seed)[0][0] for seed in range(10)} == {int(order.indices[0])}


def test_layers_that_keep_no_keys_and_values_are_refused(tmp_path):
    target = load(tmp_path, "llama")
    target.model.config.layer_types = ["linear_attention", "full_attention"] * 2
    with pytest.raises(EyasError, match="linear_attention"):
        generate(target, [[20]], 4, 0.0, 1.0, 0)


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    folder = make_target(tmp_path)
    assert load_tokenizer(TargetSpec.load(folder)).chat_template
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(EyasError, match="no chat template"):
        load_tokenizer(TargetSpec.load(folder))


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "config.json").is_file(), reason="the demo's target is not fetched")
def test_real_answers_equal_the_library_s_but_for_ties():
    target = Target.load(TargetSpec.load(REAL))
    questions = ["Why is the sky blue?", "Write a haiku about rain.", "List three uses of a brick.", "Hi!"]
    asked = [[{"role": "user", "content": q}] for q in questions]
    prompts = [
        target.tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in asked
    ]
    tokens = int(os.environ.get("EYAS_TEST_TOKENS", "24"))
    for prompt, answer in zip(prompts, generate(target, prompts, tokens, 0.0, 1.0, 0), strict=True):
        alone = one_by_one(target, prompt, tokens)
        part = next((i for i, (a, b) in enumerate(zip(answer, alone, strict=False)) if a != b), None)
        if part is not None:
            with torch.no_grad():
                logits = target.model(torch.tensor([prompt + alone[:part]])).logits[0, -1]
            assert (logits[answer[part]] - logits[alone[part]]).abs() < 1e-3
        else:
            assert answer == alone
