"""Tiny models are written as GGUF files, which transformers reads again, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from alphaapollo.cli.main import main
from alphaapollo.plugins.gguf import export
from alphaapollo.plugins.gguf.export import PRE_TOKENIZERS, TEXTS
from alphaapollo.plugins.gguf.read import import_gguf

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SIZES = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 420, "max_position_embeddings": 16384}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ENDS = {"<|endoftext|>": "eos_token_id", "<|im_end|>": "eot_token_id"}


def save_tokenizer(folder: Path, kind: str) -> None:
    """Train a byte-level BPE with 400 tokens that splits text like llama.cpp's `kind`."""
    steps = {
        "words": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        "digits": pre_tokenizers.Digits(individual_digits=True),
    }
    names = next(names for names, name in PRE_TOKENIZERS.items() if name == kind)
    core = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))  # as llama.cpp reads it
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [steps[name] if name in steps else pre_tokenizers.Split(Regex(name), "isolated") for name in names]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [*TEXTS, CHATML] * 9, trainers.BpeTrainer(vocab_size=390, show_progress=False, initial_alphabet=alphabet)
    )
    core.add_special_tokens(["<s>", "<|im_start|>", *ENDS])
    core.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    if kind == "llama-bpe":
        core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))])
    PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="<|endoftext|>", chat_template=CHATML
    ).save_pretrained(folder)


def save_model(folder: Path, family: str, kind: str = "qwen2", **settings: Any) -> Path:
    save_tokenizer(folder, kind)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | {"bos_token_id": None, "eos_token_id": None} | settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.mul_(3).add_(0.1 * torch.randn_like(parameter))  # attention and biases matter
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "kind", "settings"),
    [
        ("llama", "smollm", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e5}}),
        ("llama", "llama-bpe", {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
        ("qwen2", "qwen2", {"head_dim": 16, "rms_norm_eps": 1e-4}),
        ("qwen3", "qwen2", {"head_dim": 32, "tie_word_embeddings": True}),
    ],
)
def test_a_file_is_read_again_bit_for_bit(tmp_path: Path, family: str, kind: str, settings: dict[str, Any]) -> None:
    folder = save_model(tmp_path / "tiny", family, kind, **settings)
    assert main(["export", str(folder), str(tmp_path / "new"), "--gguf", "f32"]) == 0
    file = tmp_path / "new/tiny-f32.gguf"
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    import_gguf(file, tmp_path / "read")
    before, after = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "read"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    fields = gguf.GGUFReader(file).fields
    ids = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ENDS.values()}
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert {tokens[index]: name for name, index in ids.items()} == ENDS
    assert (fields["tokenizer.ggml.pre"].contents(), len(tokens)) == (kind, SIZES["vocab_size"])
    assert fields["tokenizer.ggml.add_bos_token"].contents() == (kind == "llama-bpe")
    assert fields["tokenizer.chat_template"].contents() == CHATML


@pytest.mark.parametrize("kind", ["q8_0", "f16", "bf16"])
def test_types_of_weights(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "tiny", "qwen3", intermediate_size=80)
    assert main(["export", str(folder), *(["--gguf"] if kind == "q8_0" else ["--gguf", kind])]) == 0
    file = tmp_path / f"tiny-{kind}.gguf"
    assert f"model written to {file}" in capsys.readouterr().out
    reader = gguf.GGUFReader(file)
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"]
    kinds = {tensor.name: tensor.tensor_type.name.lower() for tensor in reader.tensors}
    assert (kinds["blk.1.ffn_up.weight"], kinds["blk.1.attn_norm.weight"]) == (kind, "f32")
    assert kinds["blk.1.ffn_down.weight"] == ("f16" if kind == "q8_0" else kind)  # 80 is no multiple of a block
    assert main(["export", str(folder), str(file), "--gguf", kind]) == 2
    assert "already exists" in capsys.readouterr().err


def test_an_adapter_is_merged_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)  # merged models are written to outputs/
    folder = save_model(tmp_path / "tiny", "qwen3")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(tmp_path / "adapter")
    assert main(["export", "adapter", "adapter.gguf", "--gguf=f32"]) == 0
    import_gguf(tmp_path / "adapter.gguf", tmp_path / "read")
    (merged,) = (tmp_path / "outputs/merged").iterdir()
    before, expected, read = (load_file(one / "model.safetensors") for one in (folder, merged, tmp_path / "read"))
    assert all(torch.equal(expected[name], read[name]) for name in before)
    assert not all(torch.equal(before[name], read[name]) for name in before)
    assert main(["export", "adapter", "role=critic", "--gguf"]) == 2


def spoil(folder: Path, kind: str) -> None:
    """Make a folder that cannot be written."""
    settings: dict[str, dict[str, Any]] = {
        "gemma2": {},
        "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        "sliding_window": {"sliding_window": 64},
    }
    family = {"gemma2": "gemma2", "sliding_window": "mistral", "merges": "qwen3"}.get(kind, "llama")
    save_model(folder, family, **settings.get(kind, {}))
    if kind == "merges":
        file = folder / "tokenizer.json"
        core = Tokenizer.from_file(str(file))
        core.model = models.BPE(vocab=core.get_vocab(with_added_tokens=False), merges=[])
        core.save(str(file))


@pytest.mark.parametrize(
    ("kind", "fact"),
    [
        ("gemma2", "a gemma2 model"),
        ("yarn", "rope_type=yarn"),
        ("sliding_window", "sliding_window=64"),
        ("merges", "BPE with merges"),
    ],
)
def test_unsupported_models_are_refused(
    tmp_path: Path, kind: str, fact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(tmp_path / "tiny", kind)
    assert main(["export", str(tmp_path / "tiny"), "--gguf"]) == 1
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and fact in error and "convert_hf_to_gguf.py" in error
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.parametrize(("fault", "fact"), [("weights", "outputs of the written model"), ("tokens", "token ids of")])
def test_a_file_that_computes_otherwise_is_removed(
    tmp_path: Path, fault: str, fact: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "tiny", "llama", "llama-bpe")
    if fault == "weights":
        monkeypatch.setattr(export, "_interleave_rotary_halves", lambda rows, num_heads: rows)
    else:
        monkeypatch.setattr(export, "find_pre_tokenizer", lambda core: "gpt-2")
    assert main(["export", str(tmp_path / "tiny"), "--gguf", "f32"]) == 1
    assert fact in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
