import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.draft import TrainBatch
from eyas.features.contract import Features
from eyas.train.batches import pack, plan_epoch, plan_steps, prefetch

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=200).map(lambda x: np.array(x, np.int64))


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(20, 100), st.integers(1, 4), st.integers(0, 3))
def test_every_sample_is_in_exactly_one_batch_and_no_batch_exceeds_the_budget(lengths, budget, group, epoch):
    batches = plan_epoch(lengths, budget, seed=1, epoch=epoch, group=group)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    sizes = np.minimum(lengths, budget)
    assert max(sizes[b].sum() for b in batches) <= budget
    assert len(batches) % group == 0 or len(batches) == len(lengths)


def test_batches_are_full_and_level():
    lengths = np.random.default_rng(0).integers(20, 400, 5000)
    batches = plan_epoch(lengths, 8192, seed=0, epoch=0)
    loads = np.array([lengths[b].sum() for b in batches])
    assert lengths.sum() / (len(batches) * 8192) > 0.96
    assert loads.max() / loads.min() < 1.06


def test_order_follows_from_seed_and_epoch_alone():
    lengths = np.random.default_rng(0).integers(5, 50, 100)

    def order(seed, epoch):
        return [b.tolist() for b in plan_epoch(lengths, 200, seed, epoch)]

    assert order(3, 1) == order(3, 1)
    assert order(3, 1) != order(3, 2) and order(3, 1) != order(4, 1)


def test_steps_run_through_the_epochs_in_order_and_warm_up_counts_optimiser_steps():
    lengths = np.full(100, 10)
    steps = plan_steps(lengths, budget=10, group=4, seed=0, epochs=2)
    assert len(steps) == 50
    assert [s.epoch for s in steps] == [0] * 25 + [1] * 25
    assert [i for i, s in enumerate(steps) if s.ends_epoch] == [24, 49]


def test_more_steps_than_the_epochs_hold_go_on_with_the_next_epoch():
    lengths = np.full(10, 10)
    twenty = plan_steps(lengths, budget=10, group=1, seed=0, epochs=1, max_steps=20)
    fifteen = plan_steps(lengths, budget=10, group=1, seed=0, epochs=1, max_steps=15)
    assert [int(s.batches[0][0]) for s in twenty[:15]] == [int(s.batches[0][0]) for s in fifteen]
    second = plan_epoch(lengths, 10, seed=0, epoch=1)
    assert [int(s.batches[0][0]) for s in twenty[15:]] == [int(b[0]) for b in second[5:]]


def sample(length, supervised, start=0):
    mask = torch.zeros(length, dtype=torch.bool)
    mask[supervised] = True
    value = torch.arange(start, start + length)
    aux = torch.stack([value, value + 1000], 1)[..., None].expand(-1, 2, 4).to(torch.bfloat16)
    return Features(f"s{start}", value.int(), mask, aux, value[mask, None].expand(-1, 4).to(torch.bfloat16))


def test_rows_are_shifted_within_each_sample():
    batch = pack([sample(4, [2, 3]), sample(3, [0, 1], start=10)], budget=100)
    assert batch.input_ids.tolist() == [1, 2, 3, 11, 12]
    assert batch.aux[:, 0].tolist() == [0, 1, 2, 10, 11]
    assert batch.aux.shape == (5, 8)
    assert batch.supervised.tolist() == [False, True, True, True, False]
    assert batch.targets[:, 0].tolist() == [2, 3, 11]  # the state of token 0 is nobody's target
    assert batch.doc_start.tolist() == [0, 0, 0, 3, 3]
    assert batch.doc_end.tolist() == [3, 3, 3, 5, 5]


def test_a_sample_longer_than_the_budget_is_cut_at_its_end():
    batch = pack([sample(10, [1, 2, 8, 9])], budget=5)
    assert batch.input_ids.tolist() == [1, 2, 3, 4]
    assert batch.targets[:, 0].tolist() == [1, 2]


def test_packed_rows_own_their_memory(stores):
    batch = pack([stores[0][0], stores[0][1]], budget=100)
    assert batch.aux.untyped_storage().nbytes() == batch.aux.nbytes


def test_prefetch_keeps_the_order_and_raises_the_loaders_error():
    def load(i):
        return [TrainBatch(*[torch.tensor([6 // i])] * 6)]

    cpu = torch.device("cpu")
    assert [(i, int(b.input_ids)) for i, (b,), _ in prefetch(load, [3, 1, 2], cpu)] == [(3, 2), (1, 6), (2, 3)]
    with pytest.raises(ZeroDivisionError):
        list(prefetch(load, [1, 0, 1], cpu))
    assert list(prefetch(load, [], cpu)) == []
