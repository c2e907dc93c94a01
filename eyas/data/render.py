"""Messages to ids by the target's own chat template, with the loss mask taken from where its renderings divide.

For assistant turn i, `served` = messages before i and the generation prompt (what a server feeds the target),
`whole` = messages up to and with i. What follows `served` in `whole`, up to the end-of-turn token, is what the
target is to say. Where the two do not line up, the turn is rendered again with a mark in place of its text: what
stands around the mark is the template's, and `whole` must be exactly that around the text, or the row is bad.
"""

import copy
import json
import re
from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import Any

from eyas.data.conversation import REASONING, BadRow, Conversation

_MARK, _THOUGHT_MARK = "qzcontentqz", "qzreasoningqz"
_THOUGHT = re.compile(r"(\s*<think>\s*)(.*?)(\s*</think>\s*)(.*)", re.DOTALL)
_ESCAPES = ("&lt;", "&gt;", "&amp;", "&#34;", "&#39;", "&quot;", "\\u003c", "\\u0026", "\\u0027")
# What a server feeds before an assistant turn, and the turn: text, or the ids the target really said.
Turn = tuple[str, str | list[int]]
_TRIM = "; where it trims white space, trim the data"


@dataclass(frozen=True)
class Rendered:
    """One sample: `loss_mask` is True on supervised tokens."""

    token_ids: list[int]
    loss_mask: list[bool]


def assemble(turns: list[tuple[list[int], list[int]]]) -> list[Rendered]:
    """Join the (prompt ids, answer ids) of a conversation's turns: one sample, or one for each turn where the
    template rewrites history. A prompt that does not go on from the sample so far starts a new one, in which
    earlier answers are not supervised."""
    samples: list[Rendered] = []
    for prompt, answer in turns:
        before = Rendered([], [])
        if samples and prompt[: len(samples[-1].token_ids)] == samples[-1].token_ids:
            before = samples.pop()
        mask = before.loss_mask + [False] * (len(prompt) - len(before.token_ids)) + [True] * len(answer)
        samples.append(Rendered(prompt + answer, mask))
    return samples


class Template:
    """A tokenizer's chat template. `notes` counts the turns with something worth a warning."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.notes: Counter[str] = Counter()
        special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        special = sorted(special.union(tokenizer.all_special_tokens), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        # SentencePiece tokenizers put a space before the first word of a text, even of half a text.
        after_break, alone = self.ids(["\na", "a"])
        self.adds_space = after_break[-1:] != alone

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Ids of rendered texts. The template has written the special tokens: the tokenizer must add none."""
        plain = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        return self.tokenizer(texts, **plain)["input_ids"] if texts else []

    def tokenize(self, turns: list[Turn]) -> list[tuple[list[int], list[int]]]:
        """(prompt ids, answer ids) of each turn, tokenised apart: a server never tokenises what is answered."""
        texts = [said if isinstance(said, str) else "" for _, said in turns]
        prompts, answers = self.ids([prompt for prompt, _ in turns]), self.ids(texts)
        if self.adds_space:
            wholes = self.ids([prompt + text for (prompt, _), text in zip(turns, texts, strict=True)])
            pieces = zip(prompts, answers, wholes, strict=True)
            answers = [w[len(p) :] if w[: len(p)] == p else a for p, a, w in pieces]
        said = [a if isinstance(given, str) else given for (_, given), a in zip(turns, answers, strict=True)]
        return list(zip(prompts, said, strict=True))

    def text(self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool = False) -> str:
        """The template's own rendering; `prompt` adds the generation prompt. Raises BadRow where it fails."""
        options: dict[str, Any] = {"tools": tools, "tokenize": False, "add_generation_prompt": prompt}
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except Exception as e:  # a template is foreign code and raises what it likes
            raise BadRow(f"the chat template fails: {type(e).__name__}: {e}") from e

    def first_prompt(self, conversation: Conversation) -> str:
        """The messages up to the first user turn and the generation prompt; empty where no user speaks."""
        end = conversation.first_user_turn()
        return "" if end is None else self.text(conversation.messages[: end + 1], conversation.tools, prompt=True)

    def turns(self, conversation: Conversation, supervise: str = "all_turns") -> list[Turn]:
        """The supervised turns, in order. Raises BadRow."""
        said = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
        if not said:
            raise BadRow("no assistant turn")
        messages, tools, turns = self._form(conversation), conversation.tools, []
        for i in said if supervise == "all_turns" else said[-1:]:
            served = self.text(messages[:i], tools, prompt=True) if i else ""
            if answer := conversation.answers.get(i):
                turns.append((served, answer.token_ids))
            else:
                turns.append(self._turn(messages[: i + 1], tools, served))
        shown = "".join(part for part in turns[-1] if isinstance(part, str))
        for n, message in enumerate(messages[: said[-1]], 1):
            # Earlier assistant turns may lose their thoughts; what others said must be there as it was said.
            content, role = message["content"], message["role"]
            escaped = json.dumps(content, ensure_ascii=False)[1:-1] if role == "tool" else content
            if role != "assistant" and content not in shown and escaped not in shown:
                raise BadRow(f"the chat template does not render {role} turn {n} verbatim{_TRIM}")
        if any(e in shown and e not in json.dumps([messages, tools], ensure_ascii=False) for e in _ESCAPES):
            self.notes["the template escapes characters, as in &lt;"] += 1
        return turns

    def check_answers(self, conversation: Conversation) -> None:
        """The ids of given answers say what stands there in words. Raises BadRow."""
        for i, answer in conversation.answers.items():
            ids, content = answer.token_ids, conversation.messages[i]["content"]
            if max(ids) >= (known := len(self.tokenizer)):
                raise BadRow(f"answers: turn {i + 1} has id {max(ids)}, the tokenizer knows {known}")
            ids = ids[:-1] if answer.finish == "stop" else ids
            if (text := self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)) != content:
                raise BadRow(f"answers: the ids of turn {i + 1} say {text!r:.60}, its content {content!r:.60}")

    def _turn(self, messages: list[dict[str, Any]], tools: list[Any] | None, served: str) -> tuple[str, str]:
        """The last message as a turn after the prompt `served` (empty for a conversation's first message)."""
        message, n = messages[-1], len(messages)
        content, calls = message["content"] or "", message.get("tool_calls")
        if found := self.special.search(re.sub("</?think>", " ", content)):
            raise BadRow(f"assistant turn {n} holds the special token {found[0]!r} as text")
        whole = self.text(messages, tools)
        reasoning, said, probe = _probe(message)
        if n > 1 and not calls and not message.get(REASONING[0]) and whole.startswith(served + content):
            return served, self._until_end_of_turn(whole[len(served) :], len(content))

        probed = self.text([*messages[:-1], probe], tools)
        if probed.count(_MARK) != 1 or probed.count(_THOUGHT_MARK) != bool(reasoning):
            raise BadRow(f"the chat template does not render assistant turn {n}'s content or reasoning")
        head, tail = probed.split(_MARK)
        if reasoning:
            head, between = head.split(_THOUGHT_MARK)
            said = reasoning + between + said
        end = len(head + said)
        if calls and whole.startswith(head + said):
            # The mark stood without the calls; where the ends differ, the last special token ends the turn.
            ends = [m.start() for m in self.special.finditer(whole, end)] or [len(whole)]
            end = len(whole) - len(tail) if whole.endswith(tail) else ends[-1]
        elif whole != head + said + tail:
            raise BadRow(f"the chat template does not render assistant turn {n} verbatim{_TRIM}")

        start, prompt = len(head), head if n == 1 else served
        if n > 1 and head.startswith(served):
            # White space is said with the first word. Anything else that the template put there, such as an empty
            # think block, is not the target's.
            start = len(served) if reasoning or head[len(served) :].isspace() else len(head)
            prompt = whole[:start]
        elif n > 1 and (reasoning or served.rstrip().endswith("<think>")):
            raise BadRow(f"the generation prompt's think block does not go with assistant turn {n}")
        return prompt, self._until_end_of_turn(whole[start:], end - start)

    def _until_end_of_turn(self, text: str, content: int) -> str:
        """`text` up to the first special token behind its first `content` characters, that token included."""
        if found := self.special.search(text, content):
            return text[: found.end()]
        self.notes["the template ends a turn without a special token"] += 1
        return text[:content] + text[content:].rstrip()

    def _form(self, conversation: Conversation) -> list[dict[str, Any]]:
        """The messages in the form this template takes: it may want arguments as text, or content not null."""
        calls = [c["function"] for m in conversation.messages for c in m.get("tool_calls", [])]
        failures = []
        for kind, empty in product(("a mapping", "text"), (None, "")):
            messages = [_formed(message, kind == "text", empty) for message in conversation.messages]
            if not calls:
                return messages
            form = f"arguments as {kind}, no content as {json.dumps(empty)}"
            try:
                text = self.text(messages, conversation.tools)
            except BadRow as e:
                failures.append(f"{form}: {e.reason}")
                continue
            lost = [c["name"] for c in calls if any(part not in text for part in (c["name"], *c["arguments"]))]
            shown = [c["name"] for c in calls if c["arguments"] and str(c["arguments"]) in text]
            if not lost + shown:
                return messages
            failures.append(f"{form}: call of {(lost + shown)[0]} is {'left out' if lost else 'not JSON'}")
        raise BadRow("the chat template does not render the tool calls; " + "; ".join(failures))


def _formed(message: dict[str, Any], as_text: bool, empty: str | None) -> dict[str, Any]:
    """A message for a template: reasoning under every name, arguments and missing content in one form."""
    thought = next(filter(None, map(message.get, REASONING)), None)
    formed = message | (dict.fromkeys(REASONING, thought) if thought else {})
    formed["content"] = empty if message["content"] is None else message["content"]
    if as_text and "tool_calls" in message:
        formed["tool_calls"] = copy.deepcopy(message["tool_calls"])
        for call in formed["tool_calls"]:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return formed


def _probe(message: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """(reasoning, text behind it, the message with marks in their places). Templates lay out the white space
    around reasoning anew, so it belongs to neither; without reasoning the text is the whole content."""
    content, thought = message["content"] or "", _THOUGHT.fullmatch(message["content"] or "")
    probe = {k: v for k, v in message.items() if k != "tool_calls"}
    if reasoning := (given := message.get(REASONING[0], "")).strip():
        lead = content[: len(content) - len(content.lstrip())]
        probe |= dict.fromkeys(REASONING, given.replace(reasoning, _THOUGHT_MARK))
        return reasoning, content.lstrip(), probe | {"content": lead + _MARK}
    if thought and thought[2]:
        return thought[2], thought[4], probe | {"content": thought[1] + _THOUGHT_MARK + thought[3] + _MARK}
    return "", content, probe | {"content": _MARK}
