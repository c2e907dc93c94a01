"""Where loss masks begin and end, told from the ids alone: for samples whose text is not at hand."""

from typing import Any

import numpy as np

from eyas.preflight.finding import Finding, error, info, warning

ENOUGH = 3  # answers that must end with an end-of-turn token before anything is said
MOST = 0.8


def spans(mask: Any) -> list[tuple[int, int]]:
    """[begin, end) of each run of supervised tokens."""
    padded = np.concatenate([[0], np.asarray(mask).astype(np.int8), [0]])
    change = np.diff(padded)
    return list(zip(np.flatnonzero(change == 1).tolist(), np.flatnonzero(change == -1).tolist(), strict=True))


def edges(samples: list[tuple[str, Any, Any]], ends: set[int], header: int | None = None) -> Finding:
    """Do masks end with the end-of-turn token? `samples`: (id, ids, mask); `ends`: ids that end a turn; `header`:
    the id that a generation prompt ends with.

    Masks that end one token earlier and also begin one earlier, with the header's last token, are shifted. An
    answer that is cut at the sample's end says nothing.
    """
    before = within = after = 0
    first: list[int] = []
    example = {}
    for id, ids, mask in samples:
        for begin, end in spans(mask):
            first.append(int(ids[begin]))
            inside, behind = int(ids[end - 1]) in ends, end < len(ids) and int(ids[end]) in ends
            early = end - begin > 1 and int(ids[end - 2]) in ends and not inside
            for name, found in (("within", inside), ("after", behind and not inside), ("before", early)):
                if found:
                    example.setdefault(name, (id, begin, end))
            before, within, after = before + early, within + inside, after + (behind and not inside)
    ended, evidence = before + within + after, {"last": within, "one_later": after, "one_earlier": before}
    if ended < ENOUGH:
        return info(
            f"{len(first)} answers; too few have an end-of-turn token to tell where masks end", evidence=evidence
        )
    hint = "move mask and ids together; supervise the answer and its end-of-turn token, nothing before"
    if before > MOST * ended:
        id, begin, end = example["before"]
        text = f"in sample {id} tokens {begin} to {end - 1} are supervised, and {end - 2} ends the turn"
        return error(f"loss masks are shifted right by one: {text}", hint, evidence)
    if after > MOST * ended:
        id, begin, end = example["after"]
        text = f"in sample {id} tokens {begin} to {end - 1} are supervised, the end-of-turn token {end} is not"
        if first.count(header if header is not None else -1) > MOST * len(first):
            token = f"the answers begin with token id {header}, which ends the header"
            return error(f"loss masks are shifted left by one: {text}, and {token}", hint, evidence)
        return warning(
            f"end-of-turn tokens are not supervised: {text}", "the draft would never propose an end", evidence
        )
    return info(
        f"{within} of {len(first)} answers are supervised up to their end-of-turn token", evidence=evidence
    )


def moved(found: Any, expected: Any) -> str:
    """How a mask differs from the one it should be."""
    found, expected = np.asarray(found).astype(bool), np.asarray(expected).astype(bool)
    for by, side in ((1, "right"), (-1, "left")):
        if (np.roll(expected, by)[1:-1] == found[1:-1]).all():
            return f"is shifted by one to the {side}"
    if not found.any():
        return "is all zero"
    at = int((found != expected).nonzero()[0][0])
    text = f"differs at {int((found != expected).sum())} tokens, first at token {at}"
    return f"{text}: it is {int(found[at])}, expected {int(expected[at])}"
