"""Training: the stage, and the names that a training script of one's own needs.

Names are looked up when first used, so that importing this package does not import torch.
"""

from importlib import import_module

_HOMES = {
    "eyas.draft.config": ["Eagle3DraftConfig"],
    "eyas.draft.model": ["Eagle3DraftModel"],
    "eyas.train.dataset": [
        "BatchType", "Eagle3SampleFileDataset", "StandardizeFnSig", "create_collate_fn", "list_files",
        "shift_batch", "slice_and_pad_to_length", "split_files", "standardize_data_v0", "standardize_data_v1",
    ],
    "eyas.train.noise": ["AddGaussianNoise", "AddUniformNoise", "TransformTensors"],
    "eyas.vocab": ["build_vocab_mappings_from_distribution"],
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'eyas.train' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
