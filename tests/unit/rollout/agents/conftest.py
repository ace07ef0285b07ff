import pytest


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from tests.unit.rollout.agents.agents_kit import Server, write_model

    return Server(write_model(tmp_path_factory.mktemp("model")))
