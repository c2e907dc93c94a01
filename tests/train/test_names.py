"""The names of eyas.train: shown, importable, and free until used."""

import subprocess
import sys

import pytest


def test_the_names_are_shown_and_import_from_the_package():
    import eyas.train
    from eyas.train import Eagle3DraftModel, Eagle3SampleFileDataset, create_collate_fn

    assert {"Eagle3DraftModel", "Eagle3SampleFileDataset", "create_collate_fn", "shift_batch"} <= set(
        dir(eyas.train)
    )
    assert Eagle3DraftModel.__module__ == "eyas.draft.model"
    assert callable(create_collate_fn) and isinstance(Eagle3SampleFileDataset, type)


def test_every_name_shown_exists_and_says_what_it_takes():
    import eyas.train

    assert [name for name in dir(eyas.train) if not hasattr(eyas.train, name)] == []
    callables = set(eyas.train.__all__) - {"BatchType", "StandardizeFnSig"}
    assert [name for name in callables if not getattr(eyas.train, name).__doc__] == []


def test_importing_the_package_does_not_import_torch():
    script = "import sys, eyas.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_an_unknown_name_lists_the_known_ones():
    import eyas.train

    with pytest.raises(AttributeError, match="Eagle3SampleFileDataset"):
        eyas.train.SampleFileDataset  # noqa: B018
