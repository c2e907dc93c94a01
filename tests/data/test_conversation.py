import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.data.conversation import ALIASES, BadRow, parse

USER = {"role": "user", "content": "weather?"}
SAID = {"role": "assistant", "content": "sunny"}


def call(arguments, **more):
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    } | more


def reason(value) -> str:
    with pytest.raises(BadRow) as e:
        parse(value)
    return e.value.reason


def test_dialects_are_accepted_row_by_row_and_give_the_same_conversation():
    share = {"conversations": [{"from": "human", "value": "weather?"}, {"from": "gpt", "value": "sunny"}]}
    assert parse(share).messages == parse({"messages": [USER, SAID]}).messages == [USER, SAID]
    assert parse(share).content_hash() == parse({"messages": [USER, SAID]}).content_hash()


def test_every_alias_is_mapped_and_an_unknown_role_is_answered_with_the_known_ones():
    for role, aliases in ALIASES.items():
        for alias in aliases:
            assert parse({"messages": [{"from": alias, "value": "x"}]}).messages[0]["role"] == role
    assert parse({"conversations": [{"from": "observation", "value": "x"}]}).messages[0]["role"] == "tool"
    told = reason({"messages": [USER, {"role": "narrator", "content": "x"}]})
    assert "turn 2: unknown role 'narrator'" in told
    assert all(alias in told for aliases in ALIASES.values() for alias in aliases)


def test_tool_fields_reach_the_messages_unchanged_with_arguments_as_a_mapping():
    tool = {"role": "tool", "content": "21", "tool_call_id": "c1", "name": "f"}
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}]
    row = {"messages": [USER, call({}, tool_calls=calls), tool, SAID], "tools": '[{"type": "function"}]'}
    before = copy.deepcopy(row)
    conversation = parse(row)
    assert len(conversation.messages) == 4
    assert conversation.messages[1]["tool_calls"][0]["id"] == "c1"
    assert conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert conversation.messages[2] == tool
    assert conversation.tools == [{"type": "function"}]
    assert row == before
    text = '[{"function": {"name": "f", "arguments": {"city": "Paris"}}}]'
    want = [{"type": "function", "function": {"name": "f", "arguments": {"city": "Paris"}}}]
    assert parse({"messages": [USER, call({}, tool_calls=text)]}).messages[1]["tool_calls"] == want


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"conversations": []}, "no turns"),
        ({"text": "a"}, "expected `messages` or `conversations`"),
        ({"messages": [USER], "conversations": [USER]}, "found messages and conversations"),
        ({"messages": 3}, "messages: expected a list, found int"),
        ({"messages": [USER, 3]}, "turn 2: expected a dict, found int"),
        ({"messages": [{"role": "user", "content": None}]}, "user turn 1 has no content"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "assistant turn 2 has neither content nor"),
        (
            {"messages": [USER, {"role": "assistant", "content": " \n"}]},
            "assistant turn 2 has neither content nor",
        ),
        ({"messages": [USER, call("{'city': 1}")]}, "turn 2: tool call 1: arguments: not valid JSON"),
        ({"messages": [USER, call("[1]")]}, "turn 2: tool call 1: arguments: expected a dict, found list"),
        ({"messages": [USER, call({}, tool_calls=[{"function": {}}])]}, "turn 2: tool call 1: no function name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "turn 1: content part of type 'image_url'",
        ),
        (
            {"messages": [USER, SAID | {"thinking": "A", "reasoning_content": "B"}]},
            "reasoning_content and thinking conflict",
        ),
        ({"messages": [USER, SAID], "answers": [{"turn": 0, "token_ids": [1], "finish": "stop"}]}, "index 0"),
        ({"messages": [USER, SAID], "answers": [{"turn": 1, "token_ids": [], "finish": "stop"}]}, "0 ids"),
        ({"messages": [USER, SAID], "answers": [{"turn": 1}]}, "expected turn, token_ids, finish"),
    ],
)
def test_a_bad_row_says_which_turn_and_what_was_found(value, said):
    assert said in reason(value)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "wea"}, {"type": "text", "text": "ther?"}]
    assert parse({"messages": [{"role": "user", "content": parts}, SAID]}).messages == [USER, SAID]


def test_reasoning_given_twice_alike_is_kept_as_given():
    message = SAID | {"thinking": "A", "reasoning_content": "A"}
    assert parse({"messages": [USER, message]}).messages[1] == message


def test_a_lost_opening_think_tag_is_put_back_once_and_counted():
    conversation = parse({"messages": [USER, {"role": "assistant", "content": "reason</think>answer"}]})
    assert conversation.messages[1]["content"] == "<think>reason</think>answer"
    assert conversation.notes == ["think_tag_restored"]
    again = parse({"messages": conversation.messages})
    assert again.messages == conversation.messages
    assert again.notes == []


@pytest.mark.parametrize("content", ["<think>reason", "a</think>b</think>c", "</think>a<think>"])
def test_think_tags_that_cannot_be_paired_are_a_bad_row(content):
    assert "turn 2: unbalanced think tags" in reason(
        {"messages": [USER, {"role": "assistant", "content": content}]}
    )


def test_the_targets_own_ids_excuse_an_answer_that_was_cut_or_is_empty():
    answers = [{"turn": 1, "token_ids": [5, 6], "finish": "length"}]
    conversation = parse({"messages": [USER, {"role": "assistant", "content": "<think>so"}], "answers": answers})
    assert conversation.answers[1].token_ids == [5, 6]
    assert conversation.messages[1]["content"] == "<think>so"


def test_ids_are_the_rows_own_or_a_hash_of_what_was_said():
    assert parse({"id": 0, "messages": [USER, SAID]}).id == "0"
    assert parse({"messages": [USER, SAID], "category": "x"}).id == parse({"messages": [USER, SAID], "n": 1}).id
    assert parse({"messages": [USER, SAID]}).id != parse({"messages": [USER, SAID | {"content": "rain"}]}).id


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=8), v, max_size=3),
    max_leaves=8,
)
KEYS = [
    "role",
    "from",
    "content",
    "value",
    "tool_calls",
    "thinking",
    "reasoning_content",
    "type",
    "text",
    "function",
]
TURN = st.dictionaries(
    st.sampled_from([*KEYS, "name", "arguments"]), JSON | st.sampled_from(["user", "gpt", "</think>"])
)
ROWS = st.dictionaries(
    st.sampled_from(["messages", "conversations", "tools", "answers", "id"]), st.lists(TURN, max_size=3) | JSON
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ROWS)
def test_any_json_is_parsed_or_refused_never_a_crash(value):
    try:
        conversation = parse(value)
    except BadRow:
        return
    assert conversation.messages
    assert conversation.id
