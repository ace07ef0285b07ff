from alphaapollo.config.schema import Model
from alphaapollo.data.rendering import Renderer, make_template_digest
from alphaapollo.data.tool_rendering import ToolRenderer
from alphaapollo.models.load import list_template_notices
from tests.unit.tool_templates import HERMES, schema, tokenizer_of

THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
CHAT = [{"role": "user", "content": "hi"}]


def test_they_reach_the_template_at_every_rendering():
    tokenizer = tokenizer_of(HERMES + THINKING)
    silent = Renderer(tokenizer, {"enable_thinking": False})
    assert silent.render_chat(CHAT) == Renderer(tokenizer).render_chat(CHAT) + "<think></think>"
    assert Renderer(tokenizer, {"enable_thinking": True}).render_chat(CHAT) == Renderer(tokenizer).render_chat(CHAT)
    end = silent.encode(["<think></think>"])[0]
    assert silent.encode_prompt(CHAT)[-len(end) :] == silent.encode_observation(CHAT)[-len(end) :] == end


def test_environment_and_python_tools_are_combined():
    renderer = ToolRenderer(tokenizer_of(HERMES + THINKING), [schema("add", a="integer")], {"enable_thinking": False})
    text = renderer.render_chat(CHAT)
    assert '"name": "add"' in text and text.endswith("<think></think>")


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
