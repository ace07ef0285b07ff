"""Prompts with pictures are checked before workers start."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphaapollo.config.schema import Data, Env, Model
from alphaapollo.launch.input_checks import make_renderer, read_prompts
from tests.unit.data.pictures import make_picture
from tests.vision.models import make

ASK = {"role": "user", "content": "<image> How many?"}


def write(path, num_rows=2):
    rows = [{"prompt": [ASK], "images": [{"bytes": make_picture(32, 48, seed)}]} for seed in range(num_rows)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_a_vision_language_model_reads_them(tmp_path):
    make("qwen3_vl", tmp_path / "model")
    renderer = make_renderer(Env(), Model(path=str(tmp_path / "model")), {})
    path = write(tmp_path / "data.parquet")
    prompts, notices = read_prompts(path, "data.train_files", renderer, Data(max_prompt_length=64))
    assert len(prompts) == 2 and not notices
    assert len(renderer.encode_prompt(prompts[0].content)) <= 64
    with pytest.raises(
        ValueError, match=r"train_files: 2 of 2 prompts with pictures are longer than data.max_prompt_length=20"
    ):
        read_prompts(path, "data.train_files", renderer, Data(max_prompt_length=20))


def test_a_text_model_rejects_them(tmp_path):
    from alphaapollo.data.rendering import Renderer, load_tokenizer

    make("qwen3_vl", tmp_path / "model")
    renderer = Renderer(load_tokenizer(str(tmp_path / "model")))
    path = write(tmp_path / "data.parquet")
    message = (
        r"data.train_files: 2 of 2 prompts have pictures \(the first is row 0\), but the model does not read pictures"
    )
    with pytest.raises(ValueError, match=message):
        read_prompts(path, "data.train_files", renderer, Data())
