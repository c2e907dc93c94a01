import pytest

from eyas.config import RunConfig
from tests.preflight.healthy import make_healthy
from tests.preflight.workshop import bare, work  # noqa: F401 fixtures


@pytest.fixture(scope="session")
def healthy(tmp_path_factory) -> RunConfig:
    """A run that is made as far as training, and nothing wrong with it. Not to be changed: see `copy_of`."""
    return make_healthy(tmp_path_factory.mktemp("healthy") / "base")
