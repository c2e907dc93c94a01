import pytest
import torch

from eyas.draft.rows import row_plan
from eyas.errors import EyasError
from tests.draft import reference


@pytest.mark.parametrize("flags", [{}, {"norm_output": True, "norm_before_residual": True, "fc_norm": True}])
def test_decoding_gives_the_logits_of_the_training_pass(make_draft, make_documents, flags):
    """At every anchor: the chain fed with the tokens of the data, from a cache kept through crop and append."""
    model, (document,) = make_draft(num_attention_heads=6, **flags), make_documents([[True] * 12])
    steps, batch = 3, reference.pack([document])
    with torch.no_grad():
        plan = row_plan(batch, steps)
        states = model.unroll(batch, plan)
        cache = model.new_cache(16)
        verified = 0
        for anchor in (4, 5, 8):  # first pass over rows 0..4, then one row, then three
            fresh = slice(verified, anchor + 1)
            hidden = model.fuse(document.aux[:-1][fresh])
            logits, state = model.decode_step(hidden, document.x[1:][fresh], cache)
            for k in range(steps):
                place = plan.steps[k].seen.rows.tolist().index(anchor)
                torch.testing.assert_close(logits, model.lm_head(states[k][place]))
                if k < steps - 1:
                    logits, state = model.decode_step(state[None], document.x[anchor + 2 + k][None], cache)
            verified = anchor + 1
            cache.crop(verified)
            assert cache.length == verified


def test_decoding_is_the_same_in_one_pass_or_row_by_row(make_draft, make_documents):
    model, (document,) = make_draft(), make_documents([[True] * 8])
    hidden = model.fuse(document.aux)
    at_once, _ = model.decode_step(hidden, document.x, model.new_cache(8))
    cache = model.new_cache(8)
    for t in range(8):
        logits, _ = model.decode_step(hidden[t : t + 1], document.x[t : t + 1], cache)
    torch.testing.assert_close(logits, at_once)


def test_a_full_cache_is_an_error(make_draft, make_documents):
    model, (document,) = make_draft(), make_documents([[True] * 8])
    with pytest.raises(EyasError, match="cache is full: 8 rows, capacity 7"):
        model.decode_step(model.fuse(document.aux), document.x, model.new_cache(7))
