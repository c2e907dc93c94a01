"""What a check is, what it may say, and the run it looks at."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from eyas.config import RunConfig
from eyas.data.samples import Prepared, look_into
from eyas.draft import Eagle3DraftModel, init_weights
from eyas.features.contract import Features
from eyas.features.foreign import Foreign, open_features
from eyas.features.store import Store
from eyas.pipeline import read_manifest
from eyas.target.spec import TargetSpec, default_aux_layers
from eyas.target.tokenizer import load_tokenizer
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
    """Raised by a check whose input is not there (yet): it is skipped, which is not a fault."""

    def __init__(self, message: str, hint: str = "make it with `eyas run CONFIG`"):
        super().__init__(message)
        self.hint = hint


About = Literal["run", "machine", "script", "engine", "features", "draft"]


class Subject:
    """What is under test: a run, and each other thing that was named. Everything is opened when first asked for,
    and only a sample of it is read.
    """

    def __init__(
        self,
        config: RunConfig | None = None,
        script: Path | None = None,
        engine: Literal["vllm", "sglang"] | None = None,
        python: str = sys.executable,
        features: Path | None = None,
        draft: Path | None = None,
        target: str | None = None,
        import_limit: float = 60.0,
    ):
        """python: the interpreter in which `script` and `engine` will run; target: what `features` or `draft` are
        compared with, when no run names it; import_limit: seconds that importing one module may take there."""
        self.given_config, self.script, self.engine, self.python = config, script, engine, python
        self.given_features, self.draft, self.target = features, draft, target
        self.import_limit = import_limit
        self.kept: dict[Any, Any] = {}
        self.recomputed: bool | None = None  # whether the target itself gives the stored states; None: not tried

    @property
    def about(self) -> set[About]:
        """The kinds of checks that apply. A run's own features are looked at as those of a folder are."""
        given: dict[About, Any] = {"run": self.given_config, "script": self.script, "engine": self.engine}
        given |= {"features": self.given_features or self.given_config, "draft": self.draft}
        given["machine"] = self.given_config or self.script or self.engine
        return {kind for kind, value in given.items() if value}

    @property
    def config(self) -> RunConfig:
        assert self.given_config is not None, "the check is about a run, or must look at given_config"
        return self.given_config

    def folder(self, stage: str) -> Path:
        """Folder of a finished stage. Raises NotMade when it has not run."""
        folder = Path(self.config.run_dir) / stage
        if read_manifest(folder) is None:
            raise NotMade(f"stage {stage} has not run in {self.config.run_dir}")
        return folder

    @property
    def target_name(self) -> str:
        """The target's id or folder; empty when none is named."""
        return self.target or (self.given_config.target.model if self.given_config else "")

    @cached_property
    def spec(self) -> TargetSpec:
        if not self.target_name:
            raise NotMade("no target is named to compare with", "name it with --target")
        own = self.given_config.target.revision if self.given_config and not self.target else None
        return TargetSpec.load(self.target_name, own)

    @cached_property
    def weights(self) -> TargetWeights:
        return TargetWeights(self.spec)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.spec, bool(self.given_config and self.given_config.target.trust_remote_code))

    @cached_property
    def aux_layers(self) -> list[int]:
        return self.config.extract.aux_layers or default_aux_layers(self.spec.num_layers)

    @cached_property
    def prepared(self) -> Prepared:
        return look_into(self.folder("prepare") / "samples.parquet")

    @cached_property
    def features(self) -> Store | Foreign:
        """The features under test: those that were named, or the run's own training features."""
        if self.given_features:
            return open_features(self.given_features)
        return Store(self.folder("extract") / "features" / "train")

    @cached_property
    def samples(self) -> list[Features]:
        """`preflight.samples` samples of `features`, evenly spaced."""
        return self.features.spread((self.given_config or RunConfig()).preflight.samples)

    @cached_property
    def store(self) -> Store:
        """What the run would train on."""
        if isinstance(self.features, Store):
            return self.features
        return Store(self.folder("extract") / "features" / "train")

    @cached_property
    def trial(self) -> Eagle3DraftModel:
        """The draft as training starts it: `model` looks at it, `dry_run` trains it, `deploy` exports it."""
        draft = self.new_draft()
        draft.load_target(self.weights)
        init_weights(draft, self.weights, self.spec, self.config.draft.init, self.config.seed)
        return draft

    def new_draft(self) -> Eagle3DraftModel:
        return new_draft(self.config, self.spec, self.aux_layers, self.folder("vocab"))


R = TypeVar("R")
P = ParamSpec("P")


def once(function: Callable[Concatenate[Subject, P], R]) -> Callable[Concatenate[Subject, P], R]:
    """Keep what a function of a subject finds with that subject, for as long: several checks ask for it."""

    @wraps(function)
    def kept(s: Subject, /, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (function.__module__, function.__qualname__, args)
        if key not in s.kept:
            s.kept[key] = function(s, *args, **kwargs)
        return s.kept[key]

    return kept


@dataclass(frozen=True)
class Check:
    """`run(subject)` yields findings. It is run when the subject has what it is about, and skipped when a check
    named in `needs` failed or was skipped."""

    name: str
    stage: str
    needs: tuple[str, ...]
    run: Callable[[Subject], Iterable[Finding]]
    about: About = "run"
