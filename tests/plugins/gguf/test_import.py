"""Tiny GGUF files, written with the package gguf, are converted or refused."""

from __future__ import annotations

import shutil
import struct
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alphaapollo.cli.main import main
from alphaapollo.config.check import find_path_errors
from alphaapollo.config.schema import SftConfig
from alphaapollo.plugins.gguf.read import import_gguf
from alphaapollo.runs.newest_model import find_newest_model

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
SIZE, HIDDEN, VOCABULARY = 64, 96, ["<unk>", "<s>", "</s>", *map(chr, range(ord("!"), ord("~") + 1)), "Ġ", "ab"]
TYPES = gguf.GGMLQuantizationType
DiskUsage = namedtuple("DiskUsage", "total used free")


def write_file(path: Path, kind: str = "q8_0", family: str = "llama", left_out: str = "") -> dict[str, np.ndarray]:
    """Write a random Llama with one layer, and return its weights."""
    rng = np.random.default_rng(0)
    norms = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    shapes = {f"{name}.weight": (SIZE,) for name in norms} | {"token_embd.weight": (len(VOCABULARY), SIZE)}
    shapes |= {f"blk.0.attn_{name}.weight": (SIZE, SIZE) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}.weight": (HIDDEN, SIZE) for name in ("gate", "up")}
    shapes["blk.0.ffn_down.weight"] = (SIZE, HIDDEN)
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(128)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(VOCABULARY) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items() if name != left_out}
    for name, tensor in weights.items():
        if tensor.ndim == 1 or kind == "f32":
            writer.add_tensor(name, tensor)
        elif kind == "q8_0":
            writer.add_tensor(name, gguf.quantize(tensor, TYPES.Q8_0), raw_dtype=TYPES.Q8_0)
        else:
            writer.add_tensor(name, np.zeros(tensor.shape, dtype=kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.mark.parametrize(("kind", "tolerance"), [("f32", 0.0), ("q8_0", 0.02)])
def test_a_converted_folder_is_a_usual_model(tmp_path: Path, kind: str, tolerance: float) -> None:
    weights = write_file(tmp_path / "tiny.gguf", kind)
    assert main(["import-gguf", str(tmp_path / "tiny.gguf"), str(tmp_path / "new" / "model")]) == 0
    folder = tmp_path / "new" / "model"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert "quantization_config" not in (folder / "config.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == 2
    for name, found in {
        "token_embd.weight": model.get_input_embeddings().weight,
        "blk.0.ffn_up.weight": model.model.layers[0].mlp.up_proj.weight,
        "blk.0.attn_v.weight": model.model.layers[0].self_attn.v_proj.weight,
    }.items():
        assert np.abs(found.detach().numpy() - weights[name]).max() <= tolerance
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.chat_template) == ("</s>", "<s>", TEMPLATE)
    assert tokenizer.convert_ids_to_tokens(tokenizer("cab").input_ids)[-2:] == ["c", "ab"]
    assert find_newest_model(folder).model_folder == folder


def pack_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


HOSTILE: dict[str, list[tuple[bytes, int, bytes]]] = {  # further fields: key, type, value
    "deep array": [(b"a", 9, struct.pack("<IQ", 9, 1) * 100_000)],
    "many layers": [(b"llama.block_count", 4, struct.pack("<I", 10**9))],
    "no keys": [],  # transformers would build a model with 7B parameters
    "wide": [(b"llama.block_count", 4, struct.pack("<I", 0)), (b"llama.vocab_size", 4, struct.pack("<I", 2**31 - 1))],
}


def damage(path: Path, content: str) -> None:
    """Write a file that cannot be imported."""
    if content == "family":
        write_file(path, family="clip")
    elif content == "I8":
        write_file(path, "int8")
    elif content == "blk.0.ffn_up":
        write_file(path, left_out="blk.0.ffn_up.weight")
    elif content in HOSTILE:
        fields = (b"general.architecture", 8, pack_text(b"llama")), *HOSTILE[content]
        head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields))
        path.write_bytes(
            head + b"".join(pack_text(key) + struct.pack("<I", kind) + value for key, kind, value in fields)
        )
    else:
        write_file(path)
        whole = path.read_bytes()
        path.write_bytes({"magic": b"MZ" + whole, "cut": whole[:-2000]}[content])


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        ("family", "(clip)"),
        ("I8", "I8"),
        ("blk.0.ffn_up", "mlp.up_proj"),
        ("magic", "complete"),
        ("cut", "complete"),
        ("deep array", "complete"),
        ("many layers", "1000000000"),
        ("no keys", "32 layers"),
        ("wide", "and has 0"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: str, fact: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage(path := tmp_path / "bad.gguf", content)
    assert main(["import-gguf", str(path), str(tmp_path / "model")]) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1
    assert fact in error and str(path) in error
    assert list(tmp_path.iterdir()) == [path]


def test_the_disk_is_checked_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "tiny.gguf")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUsage(2**30, 2**30 - 2**20, 2**20))
    with pytest.raises(OSError, match="1 MiB free"):
        import_gguf(tmp_path / "tiny.gguf", tmp_path / "a" / "model")
    assert not (tmp_path / "a").exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tokenizer: object, folder: Path) -> None:
        assert any(folder.iterdir())
        raise OSError(28, "No space left on device")

    write_file(tmp_path / "tiny.gguf")
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", fail)
    with pytest.raises(OSError, match="No space left"):
        import_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_folder_is_not_overwritten(tmp_path: Path) -> None:
    write_file(tmp_path / "tiny.gguf")
    with pytest.raises(ValueError, match="already exists"):
        import_gguf(tmp_path / "tiny.gguf", tmp_path)
    with pytest.raises(OSError, match=r"missing\.gguf"):
        import_gguf(tmp_path / "missing.gguf", tmp_path / "model")


def test_a_gguf_file_as_model_names_the_command(tmp_path: Path) -> None:
    path = str(tmp_path / "tiny.gguf")
    config = SftConfig.model_validate({"model": {"path": path}, "data": {"train_files": []}})
    assert any(f"import-gguf {path}" in error for error in find_path_errors(config))
    with pytest.raises(ValueError, match="import-gguf"):
        find_newest_model(Path(path))
