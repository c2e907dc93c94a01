"""A conversation as the chat template will see it: rows of many dialects, checked one by one, made into one."""

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

ALIASES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "model", "bot"),
    "tool": ("tool", "observation", "function", "function_response", "tool_response"),
}
ROLES = {alias: role for role, aliases in ALIASES.items() for alias in aliases}
# Rows and templates call a turn's reasoning by any of these names.
REASONING = ("reasoning_content", "reasoning", "thinking")


class BadRow(Exception):
    """A row that cannot become a sample; `reason` says which turn, what was expected and what was found."""

    reason = property(str)


@dataclass(frozen=True)
class Answer:
    """The target's own ids for an assistant turn; when `finish` is stop, the last is its end-of-turn token."""

    token_ids: list[int]
    finish: str  # stop | length


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template: `role`, `content` (text, or None beside tool calls) and whatever else the row
    gave; tool-call arguments are mappings. `answers`: index into `messages` → the ids said there."""

    id: str
    category: str | None
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    answers: dict[int, Answer] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def content_hash(self) -> str:
        """sha256 over messages and tools: equal for rows that say the same, whatever their dialect."""
        said = json.dumps([self.messages, self.tools], sort_keys=True, default=str)
        return hashlib.sha256(said.encode()).hexdigest()

    def first_user_turn(self) -> int | None:
        """Index of the first user message."""
        return next((i for i, m in enumerate(self.messages) if m["role"] == "user"), None)


def parse(value: dict[str, Any]) -> Conversation:
    """Read one row: `messages` or `conversations`, role/content or from/value; optional id, category, tools, and
    `answers` [{turn (index from 0), token_ids, finish}]. Other fields are ignored. Raises BadRow."""
    held = [key for key in ("messages", "conversations") if value.get(key) is not None]
    if len(held) != 1:
        raise BadRow(f"expected `messages` or `conversations`, found {' and '.join(held) or sorted(value)[:8]}")
    turns = _decoded(value[held[0]], list, held[0])
    if not turns:
        raise BadRow("no turns")
    messages = [_message(turn, n) for n, turn in enumerate(turns, 1)]
    answers = _answers(value.get("answers"), messages)
    notes = []
    for n, message in enumerate(messages, 1):
        if message["role"] == "assistant" and n - 1 not in answers:
            notes += _check_said(message, n)
    tools = _decoded(value["tools"], list, "tools") if value.get("tools") else None
    category = None if value.get("category") is None else str(value["category"])
    found = Conversation("", category, messages, tools or None, answers, notes)
    ids = [str(value[k]) for k in ("id", "conversation_id", "uuid") if value.get(k) not in (None, "")]
    return replace(found, id=(ids or [found.content_hash()[:16]])[0])


def _decoded(value: Any, kind: type, name: str) -> Any:
    """A list or mapping, given as such or as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as e:
            raise BadRow(f"{name}: not valid JSON: {e.msg} at column {e.colno}") from e
    if not isinstance(value, kind):
        raise BadRow(f"{name}: expected a {kind.__name__}, found {type(value).__name__}")
    return value


def _message(turn: Any, n: int) -> dict[str, Any]:
    turn = _decoded(turn, dict, f"turn {n}")
    # Parquet gives every message every key: null means absent.
    turn = {k: v for k, v in turn.items() if v is not None}
    named = str(turn.pop("role", turn.pop("from", None)))
    role, content = ROLES.get(named.lower()), _text(turn.pop("content", turn.pop("value", None)), n)
    calls = turn.pop("tool_calls", None)
    if role is None:
        raise BadRow(f"turn {n}: unknown role {named!r}; known are {', '.join(ROLES)}")
    if content is None and role != "assistant":
        raise BadRow(f"{role} turn {n} has no content")
    message = {"role": role, "content": content} | turn
    if calls:
        calls = enumerate(_decoded(calls, list, f"turn {n}: tool_calls"), 1)
        message["tool_calls"] = [_tool_call(call, f"turn {n}: tool call {k}") for k, call in calls]
    thoughts = {k: turn[k] for k in REASONING if turn.get(k)}
    if not all(isinstance(t, str) for t in thoughts.values()) or len(set(thoughts.values())) > 1:
        raise BadRow(f"turn {n}: {' and '.join(thoughts)} conflict, or are not text")
    return message


def _text(content: Any, n: int) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow(f"turn {n}: content: expected text, found {type(content).__name__}")
    texts = []
    for part in content:
        part = _decoded(part, dict, f"turn {n}: content part")
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRow(f"turn {n}: content part of type {part.get('type')!r}; only text can be used")
        texts.append(part["text"])
    return "".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    call = {k: v for k, v in _decoded(call, dict, where).items() if v is not None}
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(f"{where}: no function name")
    # Templates differ in what they take; a mapping is the form that most of them print as JSON.
    arguments = _decoded(function.get("arguments") or {}, dict, f"{where}: arguments")
    return {"type": "function"} | call | {"function": {"name": function["name"], "arguments": arguments}}


def _check_said(message: dict[str, Any], n: int) -> list[str]:
    """An assistant turn must say something, its think tags in pairs; a lost opening tag is put back and noted."""
    text = message["content"] or ""
    if not text.strip() and not message.get("tool_calls"):
        raise BadRow(f"assistant turn {n} has neither content nor tool_calls")
    tags = re.findall("</?think>", text)
    if tags == ["</think>"]:
        message["content"] = "<think>" + text
        return ["think_tag_restored"]
    if tags != ["<think>", "</think>"] * (len(tags) // 2):
        raise BadRow(f"assistant turn {n}: unbalanced think tags: {' '.join(tags[:6])}")
    return []


def _answers(value: Any, messages: list[dict[str, Any]]) -> dict[int, Answer]:
    found = {}
    for answer in value or []:
        try:
            turn, ids, finish = int(answer["turn"]), [int(i) for i in answer["token_ids"]], answer["finish"]
        except (KeyError, TypeError, ValueError) as e:
            raise BadRow(f"answers: expected turn, token_ids, finish ({type(e).__name__}: {e})") from e
        role = messages[turn]["role"] if 0 <= turn < len(messages) else None
        if role != "assistant" or finish not in ("stop", "length") or not ids or min(ids) < 0:
            raise BadRow(f"answers: index {turn} (role {role}) with {len(ids)} ids, finish {finish!r} cannot be")
        found[turn] = Answer(ids, finish)
    return found
