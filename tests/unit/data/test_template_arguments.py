from alphaapollo.config.schema import Model
from alphaapollo.data.rendering import Renderer, make_template_digest
from alphaapollo.models.load import list_template_notices
from tests.unit.tool_templates import HERMES, tokenizer_of

THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def test_template_variable_that_is_not_read_is_reported(tmp_path):
    from transformers import Qwen3Config

    Qwen3Config().save_pretrained(tmp_path)
    arguments, renderer = {"enable_thinking": False, "x": 1}, Renderer(tokenizer_of(HERMES + THINKING))
    (warning,) = list_template_notices(Model(path=str(tmp_path)), renderer, arguments)
    assert warning.startswith("data.apply_chat_template_kwargs.x has no effect: ")


def test_another_template_than_in_training_is_reported(tmp_path):
    from transformers import Qwen3Config

    model, trained, other = Model(path=str(tmp_path)), tokenizer_of(HERMES), tokenizer_of(HERMES + THINKING)
    Qwen3Config(chat_template_digest=make_template_digest(trained)).save_pretrained(tmp_path)
    assert list_template_notices(model, Renderer(trained), {}) == []
    (notice,) = list_template_notices(model, Renderer(other), {})
    assert str(tmp_path) in notice and "another chat template" in notice
    Qwen3Config().save_pretrained(tmp_path)
    assert list_template_notices(model, Renderer(other), {}) == []
