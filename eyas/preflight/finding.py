"""What a check is and what it may say."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from eyas.config import RunConfig
from eyas.pipeline import read_manifest


@dataclass(frozen=True)
class Finding:
    """One fact. `error` fails the preflight, `warning` is for a person to weigh, `info` is evidence kept."""

    level: Literal["info", "warning", "error"]
    message: str
    hint: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


class NotMade(Exception):
    """Raised by a check whose input has not been made yet: it is skipped, which is not a fault."""


class Subject:
    """The run under test. Everything is opened when first asked for, and only a sample of it is read."""

    def __init__(self, config: RunConfig):
        self.config = config
        self.run_dir = Path(config.run_dir)

    def folder(self, stage: str) -> Path:
        """Folder of a finished stage. Raises NotMade when the stage has not run."""
        folder = self.run_dir / stage
        if read_manifest(folder) is None:
            raise NotMade(f"stage {stage} has not run in {self.run_dir}")
        return folder

    @cached_property
    def spec(self):
        from eyas.target.spec import TargetSpec

        return TargetSpec.load(self.config.target.model, self.config.target.revision)

    @cached_property
    def weights(self):
        from eyas.target.weights import TargetWeights

        return TargetWeights(self.spec)

    @cached_property
    def store(self):
        from eyas.features.store import Store

        return Store(self.folder("extract") / "features" / "train")

    @cached_property
    def indices(self) -> list[int]:
        """`preflight.samples` store indices, evenly spaced over the whole store."""
        count = min(self.config.preflight.samples, len(self.store))
        return [i * len(self.store) // count for i in range(count)]

    @cached_property
    def samples(self) -> list:
        """The features at `indices`."""
        return [self.store[i] for i in self.indices]


@dataclass(frozen=True)
class Check:
    """`run(subject)` yields findings; it is skipped when a check named in `needs` failed or was skipped."""

    name: str
    stage: str
    needs: tuple[str, ...]
    run: Callable[[Subject], Iterable[Finding]]
