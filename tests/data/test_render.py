"""The loss mask on real chat templates and on odd ones: which text is supervised, token by token."""

import copy
from itertools import groupby

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eyas.data.conversation import BadRow, parse
from eyas.data.render import Template, assemble

USER, SAID = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
TWO_TURNS = [USER, SAID, {"role": "user", "content": "Really?"}, {"role": "assistant", "content": "Yes, really."}]
WEATHER = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TOOL_TALK = [
    {"role": "user", "content": "Weather in Paris?"},
    {"role": "assistant", "content": None, "tool_calls": [WEATHER]},
    {"role": "tool", "content": "21 degrees", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is 21 degrees."},
]


def with_template(tokenizer, template: str):
    changed = copy.copy(tokenizer)
    changed.chat_template = template
    return changed


def samples(tokenizer, messages, supervise="all_turns", **row):
    template = Template(tokenizer)
    return assemble(template.tokenize(template.turns(parse({"messages": messages, **row}), supervise)))


def spans(tokenizer, sample) -> list[tuple[bool, str]]:
    """Neighbouring tokens of one kind, decoded: (supervised, text)."""
    pairs = zip(sample.token_ids, sample.loss_mask, strict=True)
    return [(m, tokenizer.decode([t for t, _ in run])) for m, run in groupby(pairs, key=lambda p: p[1])]


def supervised(tokenizer, sample) -> list[str]:
    return [text for m, text in spans(tokenizer, sample) if m]


def reason(tokenizer, messages, **row) -> str:
    with pytest.raises(BadRow) as e:
        samples(tokenizer, messages, **row)
    return e.value.reason


def test_chatml_supervises_both_answers_with_their_end_of_turn_and_nothing_between(smollm2_tokenizer):
    (sample,) = samples(smollm2_tokenizer, TWO_TURNS)
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert spans(smollm2_tokenizer, sample) == [
        (False, system + "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Because.<|im_end|>"),
        (False, "\n<|im_start|>user\nReally?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Yes, really.<|im_end|>"),
    ]
    assert 0 < sum(sample.loss_mask) < len(sample.token_ids)


def test_last_turn_supervises_the_last_answer_alone(smollm2_tokenizer):
    (sample,) = samples(smollm2_tokenizer, TWO_TURNS, "last_turn")
    assert supervised(smollm2_tokenizer, sample) == ["Yes, really.<|im_end|>"]
    (whole,) = samples(smollm2_tokenizer, TWO_TURNS)
    assert sample.token_ids == whole.token_ids


def test_a_trailing_user_turn_is_not_in_the_sample(smollm2_tokenizer):
    assert samples(smollm2_tokenizer, TWO_TURNS[:3]) == samples(smollm2_tokenizer, TWO_TURNS[:2])


def test_llama31_has_exactly_one_begin_token_and_supervises_the_end_of_turn(llama31_tokenizer):
    (sample,) = samples(llama31_tokenizer, TWO_TURNS)
    begin = llama31_tokenizer.bos_token_id
    assert llama31_tokenizer("x").input_ids[0] == begin
    assert sample.token_ids[0] == begin
    assert sample.token_ids.count(begin) == 1
    assert supervised(llama31_tokenizer, sample) == ["Because.<|eot_id|>", "Yes, really.<|eot_id|>"]
    assert spans(llama31_tokenizer, sample)[0][1].endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")


def test_ids_equal_those_of_the_whole_rendering_for_real_templates(smollm2_tokenizer, llama31_tokenizer):
    for tokenizer in (smollm2_tokenizer, llama31_tokenizer):
        (sample,) = samples(tokenizer, TWO_TURNS)
        whole = tokenizer.apply_chat_template(TWO_TURNS, tokenize=True, return_dict=False)
        assert whole[: len(sample.token_ids)] == sample.token_ids


def test_qwen3_leaves_its_empty_think_block_unsupervised(qwen3_tokenizer):
    (sample,) = samples(qwen3_tokenizer, TWO_TURNS[:2])
    assert spans(qwen3_tokenizer, sample) == [
        (False, "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        (True, "Because.<|im_end|>"),
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "<think>step</think>answer"},
        {"role": "assistant", "content": "<think>\nstep\n</think>\n\nanswer"},
        {"role": "assistant", "content": "step</think>answer"},
        {"role": "assistant", "content": "answer", "reasoning_content": "step"},
        {"role": "assistant", "content": "\n\nanswer", "thinking": "step\n"},
    ],
)
def test_qwen3_supervises_thought_and_answer_however_the_row_gives_them(qwen3_tokenizer, message):
    (sample,) = samples(qwen3_tokenizer, [USER, message])
    assert supervised(qwen3_tokenizer, sample) == ["<think>\nstep\n</think>\n\nanswer<|im_end|>"]
    assert sum(sample.loss_mask) == 8  # <think> \n step \n </think> \n\n answer <|im_end|>


def test_qwen3_strips_thoughts_from_history_so_each_turn_is_a_sample_as_it_is_served(qwen3_tokenizer):
    first = {"role": "assistant", "content": "Because.", "reasoning_content": "hm"}
    one, two = samples(qwen3_tokenizer, [USER, first, *TWO_TURNS[2:]])
    assert supervised(qwen3_tokenizer, one) == ["<think>\nhm\n</think>\n\nBecause.<|im_end|>"]
    assert supervised(qwen3_tokenizer, two) == ["Yes, really.<|im_end|>"]
    prompt = qwen3_tokenizer.apply_chat_template(
        [USER, first, TWO_TURNS[2]], add_generation_prompt=True, return_dict=False
    )
    assert two.token_ids[: len(prompt)] == prompt
    assert "hm" not in qwen3_tokenizer.decode(two.token_ids)


def test_chatml_refuses_a_thought_that_it_would_drop(smollm2_tokenizer):
    told = reason(smollm2_tokenizer, [USER, SAID | {"reasoning_content": "hm"}])
    assert "does not render assistant turn 2's content or reasoning" in told
    inline = [USER, {"role": "assistant", "content": "<think>a</think>b"}]
    assert supervised(smollm2_tokenizer, samples(smollm2_tokenizer, inline)[0]) == ["<think>a</think>b<|im_end|>"]


def test_qwen3_renders_four_turns_of_a_tool_call_and_supervises_the_call(qwen3_tokenizer):
    (sample,) = samples(qwen3_tokenizer, TOOL_TALK[:2], tools=TOOLS)
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
    assert supervised(qwen3_tokenizer, sample) == [call]
    all_turns = samples(qwen3_tokenizer, TOOL_TALK, tools=TOOLS)
    assert [t for s in all_turns for t in supervised(qwen3_tokenizer, s)] == [call, "It is 21 degrees.<|im_end|>"]
    text = qwen3_tokenizer.decode(all_turns[-1].token_ids)
    assert text.count("<|im_start|>") == 5  # the system turn with the tools, and four turns
    assert "<tool_response>\n21 degrees\n</tool_response>" in text


def test_arguments_keep_their_characters(qwen3_tokenizer):
    hard = {"function": {"name": "find", "arguments": {"q": "a<b & 'c' é"}}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [hard]}]
    template = Template(qwen3_tokenizer)
    ((_, answer),) = template.turns(parse({"messages": messages}))
    assert "a<b & 'c' é" in answer
    assert not any(template.notes.values())
    escaping = Template(
        with_template(qwen3_tokenizer, CALLS.replace("TEXT", "(call.function.arguments | tojson) | e"))
    )
    escaping.turns(parse({"messages": messages}))
    assert [n for note, n in escaping.notes.items() if "escapes" in note] == [1]
    plain = Template(qwen3_tokenizer)
    plain.turns(parse({"messages": [USER, SAID | {"content": "write &lt; for <"}]}))
    assert not any(plain.notes.values())


CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "[{{ call.function.name }} {{ TEXT }}]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "text",
    [
        "call.function.arguments | tojson",
        "'' + call.function.arguments",
        "call.function.arguments",
        "call.function.arguments if call.function.arguments is string else (call.function.arguments | tojson)",
    ],
)
def test_arguments_take_the_form_that_the_template_wants(qwen3_tokenizer, text):
    tokenizer = with_template(qwen3_tokenizer, CALLS.replace("TEXT", text))
    (sample,) = samples(tokenizer, TOOL_TALK)
    assert supervised(tokenizer, sample) == [
        '[get_weather {"city": "Paris"}]<|im_end|>',
        "It is 21 degrees.<|im_end|>",
    ]


def test_a_template_that_takes_no_form_says_what_failed_with_each(qwen3_tokenizer, smollm2_tokenizer):
    told = reason(with_template(qwen3_tokenizer, CALLS.replace("TEXT", "call.nothing.at_all")), TOOL_TALK)
    assert "arguments as a mapping, no content as null: the chat template fails: UndefinedError" in told
    assert "arguments as text" in told
    assert "call of get_weather is left out" in reason(smollm2_tokenizer, TOOL_TALK)


def test_a_template_that_wants_null_content_beside_calls_gets_it(qwen3_tokenizer):
    null = CALLS.replace("m.tool_calls or []", "(m.tool_calls if m.content is not string else []) or []")
    tokenizer = with_template(qwen3_tokenizer, null.replace("TEXT", "call.function.arguments | tojson"))
    assert (
        supervised(tokenizer, samples(tokenizer, TOOL_TALK)[0])[0] == '[get_weather {"city": "Paris"}]<|im_end|>'
    )


def test_a_call_ends_where_a_plain_turn_would_even_if_the_template_ends_the_text_too(qwen3_tokenizer):
    closing = CALLS.replace("TEXT", "call.function.arguments | tojson") + (
        "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
    )
    tokenizer = with_template(qwen3_tokenizer, closing)
    (sample,) = samples(tokenizer, TOOL_TALK)
    assert supervised(tokenizer, sample) == [
        '[get_weather {"city": "Paris"}]<|im_end|>',
        "It is 21 degrees.<|im_end|>",
    ]


ODD = (
    "{% for m in messages %}{% if m.role == 'user' %}@@ASK {{ m.content }} @@\n"
    "{% else %}@@TELL {{ m.content }} @@END\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}@@TELL {% endif %}"
)


def test_odd_markers_of_ordinary_text_need_no_special_token(smollm2_tokenizer):
    tokenizer = with_template(smollm2_tokenizer, ODD)
    found = samples(tokenizer, TWO_TURNS)
    text = "".join(t for s in found for t in supervised(tokenizer, s))
    assert text == "Because. @@END" + "Yes, really. @@END"
    assert spans(tokenizer, found[0])[0] == (False, "@@ASK Why? @@\n@@TELL ")
    template = Template(tokenizer)
    template.turns(parse({"messages": TWO_TURNS}))
    assert template.notes["the template ends a turn without a special token"] == 2


@pytest.mark.parametrize("in_history", ["<think>\n\n</think>\n", ""])
def test_a_think_block_in_the_generation_prompt_is_not_supervised(smollm2_tokenizer, in_history):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}HISTORY{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n{% endif %}"
    ).replace("HISTORY", in_history)
    tokenizer = with_template(smollm2_tokenizer, template)
    assert spans(tokenizer, samples(tokenizer, TWO_TURNS[:2])[0]) == [
        (False, "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n"),
        (True, "Because.<|im_end|>"),
    ]


def test_an_open_think_block_in_the_generation_prompt_needs_a_thought(smollm2_tokenizer):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    tokenizer = with_template(smollm2_tokenizer, template)
    assert "think block does not go with assistant turn 2" in reason(tokenizer, [USER, SAID])
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\nBecause."}
    (sample,) = samples(tokenizer, [USER, thought])
    assert supervised(tokenizer, sample) == ["hm\n</think>\nBecause.<|im_end|>"]


@pytest.mark.parametrize("change", ["upper", "trim"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_template_that_changes_content_is_refused_not_searched(smollm2_tokenizer, change, role):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ (m.content | CHANGE) if m.role == 'ROLE' else m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = with_template(smollm2_tokenizer, template.replace("CHANGE", change).replace("ROLE", role))
    content = {"user": "Why is it so? ", "assistant": "Because. "}[role]
    messages = [{**m, "content": content} if m["role"] == role else m for m in [USER, SAID]]
    told = reason(tokenizer, messages)
    assert "not render" in told
    assert role in told


def test_llama31_refuses_white_space_that_it_trims_and_says_how_to_mend_it(llama31_tokenizer):
    told = reason(llama31_tokenizer, [USER | {"content": "Why?\n"}, SAID])
    assert (
        told == "the chat template does not render user turn 1 verbatim; where it trims white space, trim the data"
    )
    assert "assistant turn 2 verbatim" in reason(llama31_tokenizer, [USER, SAID | {"content": " Because."}])


def test_a_first_assistant_message_is_supervised_alone(smollm2_tokenizer):
    tokenizer = with_template(smollm2_tokenizer, "{% for m in messages %}{{ m.content }}{% endfor %}")
    (sample,) = samples(tokenizer, [{"role": "assistant", "content": "A"}, {"role": "user", "content": " b c"}])
    assert sample.loss_mask[0]
    assert sum(sample.loss_mask) == 1
    (sample,) = samples(smollm2_tokenizer, [SAID, *TWO_TURNS[2:]])
    assert supervised(smollm2_tokenizer, sample) == ["Because.<|im_end|>", "Yes, really.<|im_end|>"]


def test_white_space_before_an_answer_is_said_with_its_first_word(smollm2_tokenizer):
    template = (
        "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}"
        "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    tokenizer = with_template(smollm2_tokenizer, template)
    (sample,) = samples(tokenizer, TWO_TURNS)
    assert supervised(tokenizer, sample) == [" Because.<|im_end|>", " Yes, really.<|im_end|>"]
    assert sample.token_ids == tokenizer(tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)).input_ids


def test_sentencepiece_answers_get_no_space_of_their_own():
    bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    bpe.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    bpe.train_from_iterator(["user: Why? assistant: Because. Really? Yes, really.\n"] * 8, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:\n{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    assert Template(tokenizer).adds_space
    (sample,) = samples(tokenizer, [USER, SAID])
    first = tokenizer.convert_ids_to_tokens(sample.token_ids[sample.loss_mask.index(True)])
    assert first.startswith("B")
    whole = tokenizer.apply_chat_template([USER, SAID], tokenize=True, return_dict=False, add_special_tokens=False)
    assert sample.token_ids == whole


def test_the_targets_own_ids_stand_in_for_the_text(smollm2_tokenizer):
    end = smollm2_tokenizer.eos_token_id
    pieces = [smollm2_tokenizer.convert_tokens_to_ids(c) for c in "Because"]  # not how the text would be tokenised
    answers = [{"turn": 1, "token_ids": [*pieces, end], "finish": "stop"}]
    messages = [USER, SAID | {"content": "Because"}, *TWO_TURNS[2:]]
    one, two = samples(smollm2_tokenizer, messages, answers=answers)
    prompt_len = one.loss_mask.index(True)
    assert one.token_ids[prompt_len:] == [*pieces, end]
    assert all(one.loss_mask[prompt_len:])
    assert supervised(smollm2_tokenizer, two) == ["Yes, really.<|im_end|>"]
    same = smollm2_tokenizer("Because").input_ids
    (joined,) = samples(
        smollm2_tokenizer, messages, answers=[{"turn": 1, "token_ids": [*same, end], "finish": "stop"}]
    )
    assert supervised(smollm2_tokenizer, joined) == ["Because<|im_end|>", "Yes, really.<|im_end|>"]


def test_an_answer_cut_by_length_has_no_supervised_end(smollm2_tokenizer):
    ids = smollm2_tokenizer("Because").input_ids
    messages = [USER, SAID | {"content": "Because"}]
    cut = [{"turn": 1, "token_ids": ids, "finish": "length"}]
    (sample,) = samples(smollm2_tokenizer, messages, answers=cut)
    assert supervised(smollm2_tokenizer, sample) == ["Because"]
    assert sample.loss_mask[-1]
    (longer,) = samples(smollm2_tokenizer, messages + TWO_TURNS[2:], answers=cut)
    assert supervised(smollm2_tokenizer, longer) == ["Because", "Yes, really.<|im_end|>"]


def test_special_tokens_written_as_text_in_an_answer_are_refused(smollm2_tokenizer):
    told = reason(smollm2_tokenizer, [USER, SAID | {"content": "Because.<|im_end|>\n<|im_start|>user\nmore"}])
    assert told == "assistant turn 2 holds the special token '<|im_end|>' as text"


def test_a_conversation_without_assistant_turn_or_a_failing_template_is_a_bad_row(smollm2_tokenizer):
    assert reason(smollm2_tokenizer, [USER]) == "no assistant turn"
    strict = with_template(smollm2_tokenizer, "{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in reason(strict, [USER, SAID])


WORD = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12)
SPACED = st.lists(WORD, min_size=1, max_size=4).map(" ".join).filter(lambda t: "<" not in t)


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    turns=st.lists(st.tuples(SPACED, SPACED), min_size=1, max_size=3),
    name=st.sampled_from(["chatml", "llama", "qwen"]),
)
def test_what_is_supervised_decodes_to_the_answers(
    turns, name, smollm2_tokenizer, llama31_tokenizer, qwen3_tokenizer
):
    tokenizer = {"chatml": smollm2_tokenizer, "llama": llama31_tokenizer, "qwen": qwen3_tokenizer}[name]
    end = tokenizer.eos_token
    messages = [{"role": r, "content": c} for t in turns for r, c in zip(("user", "assistant"), t, strict=True)]
    found = samples(tokenizer, messages)
    said = [t for s in found for t in supervised(tokenizer, s)]
    normal = tokenizer.decode(tokenizer("".join(a for _, a in turns), add_special_tokens=False).input_ids)
    assert "".join(said).replace(end, "") == normal
    assert "".join(said).count(end) == len(turns)
    assert (len(found) == len(turns)) if name == "qwen" else (len(found) <= len(turns))


def test_assemble_joins_only_prompts_that_go_on():
    joined = assemble([([1, 2], [3]), ([1, 2, 3, 4], [5])])
    assert [(s.token_ids, s.loss_mask) for s in joined] == [([1, 2, 3, 4, 5], [0, 0, 1, 0, 1])]
    apart = assemble([([1, 2], [3]), ([1, 9, 3, 4], [5])])
    assert [(s.token_ids, s.loss_mask) for s in apart] == [
        ([1, 2, 3], [0, 0, 1]),
        ([1, 9, 3, 4, 5], [0, 0, 0, 0, 1]),
    ]
