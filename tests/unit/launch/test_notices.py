from alphaapollo.config.schema import Env, GenerationConfig
from alphaapollo.environments.base import get_environment_spec
from alphaapollo.launch.input_checks import collect_environment_notices


def test_tools_with_unseen_results_are_reported():
    env = Env(env_name="informal_math", tools=["local_rag"])
    assert collect_environment_notices(GenerationConfig(env=env), get_environment_spec("informal_math")) == [
        "env.max_steps=1 ends an episode before the model sees the output of python_code, local_rag."
    ]
    turns = env.model_copy(update={"max_steps": 2})
    assert collect_environment_notices(GenerationConfig(env=turns), get_environment_spec("informal_math")) == []
