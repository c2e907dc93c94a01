"""What a check is, what it may say, and the run it looks at."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from eyas.config import RunConfig
from eyas.draft import Eagle3DraftModel
from eyas.features.contract import Features
from eyas.features.store import Store
from eyas.pipeline import read_manifest
from eyas.target.spec import TargetSpec, default_aux_layers
from eyas.target.weights import TargetWeights
from eyas.train.stage import new_draft


@dataclass(frozen=True)
class Finding:
    """One fact. `error` fails the preflight, `warning` is for a person to weigh, `info` is evidence kept."""

    level: Literal["info", "warning", "error"]
    message: str
    hint: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


info, warning, error = partial(Finding, "info"), partial(Finding, "warning"), partial(Finding, "error")


class NotMade(Exception):
    """Raised by a check whose input has not been made yet: it is skipped, which is not a fault."""


class Subject:
    """The run under test. Everything is opened when first asked for, and only a sample of it is read."""

    def __init__(self, config: RunConfig):
        self.config = config

    def folder(self, stage: str) -> Path:
        """Folder of a finished stage. Raises NotMade when it has not run."""
        folder = Path(self.config.run_dir) / stage
        if read_manifest(folder) is None:
            raise NotMade(f"stage {stage} has not run in {self.config.run_dir}")
        return folder

    @cached_property
    def spec(self) -> TargetSpec:
        return TargetSpec.load(self.config.target.model, self.config.target.revision)

    @cached_property
    def weights(self) -> TargetWeights:
        return TargetWeights(self.spec)

    @cached_property
    def aux_layers(self) -> list[int]:
        return self.config.extract.aux_layers or default_aux_layers(self.spec.num_layers)

    @cached_property
    def store(self) -> Store:
        return Store(self.folder("extract") / "features" / "train")

    @cached_property
    def samples(self) -> list[Features]:
        """`preflight.samples` samples, evenly spaced over the store."""
        return self.store.spread(self.config.preflight.samples)

    def new_draft(self) -> Eagle3DraftModel:
        return new_draft(self.config, self.spec, self.aux_layers, self.folder("vocab"))


@dataclass(frozen=True)
class Check:
    """`run(subject)` yields findings; it is skipped when a check named in `needs` failed or was skipped."""

    name: str
    stage: str
    needs: tuple[str, ...]
    run: Callable[[Subject], Iterable[Finding]]
