"""A small tokenizer: bytes as tokens, three special tokens, and a ChatML template."""

import pytest

from tests.unit.data.rows import Loader

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3 does: the thoughts of earlier turns are dropped.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def make_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(chat_template=CHATML, eos_token="<|im_end|>"):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", *alphabet]
        tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=eos_token,
            pad_token="<|endoftext|>",
            additional_special_tokens=["<|im_start|>", "<|im_end|>"],
            chat_template=chat_template,
        )

    return make


@pytest.fixture(scope="session")
def renderer(make_tokenizer):
    from alphaapollo.data.rendering import Renderer

    return Renderer(make_tokenizer())


@pytest.fixture(scope="session")
def forgetful_renderer(make_tokenizer):
    from alphaapollo.data.rendering import Renderer

    return Renderer(make_tokenizer(FORGETFUL))


@pytest.fixture
def loader(tmp_path, renderer):
    return Loader(tmp_path, renderer)


@pytest.fixture(scope="session")
def family_tokenizers(tmp_path_factory):
    """Tokenizers of sixteen model families, loaded from folders, by the family's name."""
    from alphaapollo.data.vocabulary import load_tokenizer
    from tests.families import FAMILIES
    from tests.family_folders import save_family

    folders = {family.name: save_family(family, tmp_path_factory.mktemp("family")) for family in FAMILIES}
    return {name: load_tokenizer(str(folder)) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def make_vision_renderer(vision_folder):
    """Function that makes the renderer of a tiny vision-language model."""
    from alphaapollo.data.images import load_image_processor
    from alphaapollo.data.rendering import Renderer
    from alphaapollo.data.vocabulary import load_tokenizer

    def make(family="qwen3_vl"):
        tokenizer = load_tokenizer(str(vision_folder(family)))
        return Renderer(tokenizer, images=load_image_processor(str(vision_folder(family)), tokenizer))

    return make


@pytest.fixture(scope="session")
def small_model_folder(tmp_path_factory):
    """A folder with the config of a text model."""
    from transformers import Qwen3Config

    folder = tmp_path_factory.mktemp("text")
    Qwen3Config().save_pretrained(folder)
    return folder
