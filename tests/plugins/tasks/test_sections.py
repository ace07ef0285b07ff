"""The section env.harbor: a field of `env`."""

from os.path import expanduser

import pytest

from alphaapollo.config.errors import ConfigError
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config


def test_the_section_has_no_plugins_in_its_name() -> None:
    words = [
        "env.env_name=harbor",
        "env.plugins.harbor.backend=docker",
        "env.harbor.max_sandboxes=2",
        "env.harbor.rootfs=~/m",
    ]
    config = load_config(Config, "ppo", words)
    assert config.model_dump()["env"]["harbor"] == {
        "backend": "docker",
        "rootfs": expanduser("~/m"),
        "max_sandboxes": 2,
    }
    assert config.env.plugins == {} and config.env.find_plugin_section("harbor").backend == "docker"
    with pytest.raises(ConfigError, match=r"env\.harbor\.backnd .*Did you mean 'env\.harbor\.backend'"):
        load_config(Config, "ppo", ["env.harbor.backnd=docker"])
