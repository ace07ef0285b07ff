"""Conversion of a Hugging Face model folder to a GGUF file, which llama.cpp, Ollama and LM Studio read."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from alphaapollo.config.schema import Model
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.models.checkpoint import explain_write_errors
from alphaapollo.models.export import check_exported_outputs, compute_outputs, make_probe_tokens
from alphaapollo.models.load import is_causal_lm, load_causal_lm, load_config
from alphaapollo.models.quantized import dequantize_layers
from alphaapollo.plugins.gguf.read import compute_rope_factors, load_gguf, open_gguf, require_gguf_package
from alphaapollo.utils.json_types import JsonObject

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # model_type: name in the file
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {  # steps of a tokenizer.json: llama.cpp's name, whose regular expressions are the same
    ("words",): "gpt-2",
    ("digits", "words"): "smollm",
    (WORDS % "{1,3}", "bytes"): "llama-bpe",
    (WORDS % "", "bytes"): "qwen2",
}
CONVERTER = "llama.cpp's convert_hf_to_gguf.py converts other models."
TEXTS = (  # in the form that Unicode normalization leaves unchanged
    "Hello world! It's 3.14, we'LL  see on 2026-01-02.\n\n\tdef f(x):\n    return x**2  \r\n",
    "  naïve café 東京です。 привет 😀 مرحبا",
)


def export_gguf(folder: Path, file: Path, kind: str, name: str, base_model: str = "") -> str:
    """Write the model of a Hugging Face folder to a new GGUF `file`, read the file again, and compare log-probs and
    token ids. Returns the result as a sentence. kind: type of the matrices: q8_0, f16, bf16 or f32; vectors are f32.
    base_model: hub id of the model that it was trained from, if known.

    Raises:
        ValueError: the model cannot be converted, or the file computes other outputs.
        OSError: the file cannot be written. No incomplete file remains.
    """
    from gguf import GGUFWriter

    source = Model(path=str(folder))
    config, tokenizer = load_config(source), load_tokenizer(str(folder))
    check_can_export(config)
    pre_tokenizer = find_pre_tokenizer(json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {})
    model = load_causal_lm(source, "padded").float().eval()
    dequantize_layers(model)
    probe = make_probe_tokens(config)
    exact = compute_outputs(model, "policy", probe)
    with explain_write_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=file.parent, prefix=".unverified_") as part:
            written = Path(part, file.name)
            writer = GGUFWriter(written, FAMILIES[config.model_type])
            _add_metadata(writer, config, folder, kind, name, base_model, int(model.num_parameters()))
            _add_tokenizer(writer, tokenizer, pre_tokenizer, str(folder), config.vocab_size)
            _add_and_round_weights(writer, model, kind)
            rounded = compute_outputs(model, "policy", probe)
            gap = check_exported_outputs(exact, rounded, torch.bfloat16)
            del model
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            read, read_tokenizer = load_gguf(written, open_gguf(written))
            check_exported_outputs(rounded, compute_outputs(read, "policy", probe), torch.float32)
            _check_token_ids(tokenizer, read_tokenizer)
            written.rename(file)
    return (
        f"transformers reads this file: token ids are equal, and its log-probs of a probe differ from the model's by "
        f"{gap:.1e} on average (weights in {kind})."
    )


def check_can_export(config: PretrainedConfig | None) -> None:
    """Raise ValueError if the package gguf is missing, or a model cannot be written as a GGUF file."""
    require_gguf_package()
    if config is None:
        return
    if config.model_type not in FAMILIES or not is_causal_lm(config):
        kind = config.model_type if is_causal_lm(config) else config.architectures[0]
        raise ValueError(f"a {kind} model cannot be written as GGUF, only {', '.join(FAMILIES)}. {CONVERTER}")
    rope = config.rope_parameters.get("rope_type", "default")
    supported = {
        "hidden_act": config.hidden_act == "silu",
        "rope_type": rope == "default" or (rope == "llama3" and FAMILIES[config.model_type] == "llama"),
        **{key: not getattr(config, key, None) for key in ("attention_bias", "mlp_bias", "sliding_window")},
    }
    for key, is_supported in supported.items():
        if not is_supported:
            value = rope if key == "rope_type" else getattr(config, key)
            raise ValueError(f"{config.model_type} with {key}={value} cannot be written as GGUF. {CONVERTER}")


def _add_metadata(
    writer: GGUFWriter, config: PretrainedConfig, folder: Path, kind: str, name: str, base_model: str, num_weights: int
) -> None:
    from gguf import GGML_QUANT_VERSION, GGUFType, LlamaFileType, Metadata

    name = "Mistral" if name == "mistral" else name  # transformers does not read a file with the latter
    metadata = Metadata.load(model_path=folder, model_name=name, total_params=num_weights)  # also of its README.md
    if base_model and not metadata.base_models:
        organization, _, base_name = base_model.rpartition("/")
        url = f"https://huggingface.co/{base_model}"
        metadata.base_models = [{"name": base_name, "organization": organization, "repo_url": url}]
    metadata.set_gguf_meta_model(writer)
    writer.add_type(GGUFType.MODEL)
    writer.add_file_type(LlamaFileType[f"{'ALL' if kind == 'f32' else 'MOSTLY'}_{kind.upper()}"])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.rope_parameters.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", compute_rope_factors(config))


def _add_tokenizer(
    writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, pre_tokenizer: str, folder: str, vocab_size: int
) -> None:
    from gguf import TokenType

    core = json.loads(tokenizer.backend_tokenizer.to_str())
    added = tokenizer.added_tokens_decoder
    tokens, kinds = [], []
    if len(tokenizer) > vocab_size:
        raise ValueError(f"{folder} has {len(tokenizer)} tokens, but embeddings of {vocab_size}. Choose another model.")
    for index, token in enumerate(tokenizer.convert_ids_to_tokens(list(range(vocab_size)))):
        tokens.append(f"[PAD{index}]" if token is None else token)
        is_control = index in added and added[index].special
        named = TokenType.CONTROL if is_control else TokenType.USER_DEFINED if index in added else TokenType.NORMAL
        kinds.append(TokenType.UNUSED if token is None else named)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in core["model"]["merges"]])
    ends = Renderer(tokenizer, model_path=folder).eos_token_ids
    ids = dict(zip(("eos", "eot", "eom"), ends, strict=False))  # llama.cpp stops at each of them
    ids |= {"bos": tokenizer.bos_token_id, "pad": tokenizer.pad_token_id, "unk": tokenizer.unk_token_id}
    for name, token_id in ids.items():
        if token_id is not None:
            getattr(writer, f"add_{name}_token_id")(token_id)
    with_special = tokenizer.encode("a")
    writer.add_add_bos_token(with_special[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(with_special[-1] == tokenizer.eos_token_id)
    writer.add_add_space_prefix(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.get_chat_template())  # of several, the default one


def find_pre_tokenizer(core: JsonObject) -> str:
    """Return llama.cpp's name for the pre-tokenizer of a tokenizer.json. Raises ValueError if it has none."""
    first = core.get("pre_tokenizer") or {}
    name = PRE_TOKENIZERS.get(tuple(_describe_step(step) for step in first.get("pretokenizers", [first])))
    model = core.get("model", {})
    is_normalized = (core.get("normalizer") or {"type": "NFC"}) != {"type": "NFC"}
    ignores_merges = bool(model.get("ignore_merges")) != (name == "llama-bpe")  # llama.cpp does it for this name
    if name is None or is_normalized or ignores_merges or not model.get("merges"):
        known = ", ".join(PRE_TOKENIZERS.values())
        raise ValueError(f"the tokenizer is not a byte-level BPE with merges and splits like {known}. {CONVERTER}")
    return name


def _describe_step(step: Any) -> str:
    if step.get("individual_digits"):
        return "digits"
    if step.get("type") == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return str(step["pattern"].get("Regex"))
    if step.get("type") == "ByteLevel" and not step["add_prefix_space"]:
        return "words" if step["use_regex"] else "bytes"
    return "unknown"


@torch.no_grad()
def _add_and_round_weights(writer: GGUFWriter, model: PreTrainedModel, kind: str) -> None:
    """Add the quantized weights to a file, and set the model's weights to the dequantized ones."""
    from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, dequantize, get_tensor_name_map, quantize

    config, family = model.config, FAMILIES[model.config.model_type]
    architecture = next(number for number, name in MODEL_ARCH_NAMES.items() if name == family)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        values, stored = parameter.numpy(), GGMLQuantizationType[kind.upper()]
        if values.ndim == 1:
            stored = GGMLQuantizationType.F32
        elif values.shape[-1] % GGML_QUANT_SIZES[stored][0]:  # no multiple of a block; llama.cpp does the same
            stored = GGMLQuantizationType.F16
        data = quantize(values, stored)
        parameter.data = torch.from_numpy(dequantize(data, stored))
        num_heads = heads.get(".".join(name.split(".")[-2:]))
        if num_heads and family == "llama":
            data = _interleave_rotary_halves(data, num_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), data, raw_dtype=stored)


def _interleave_rotary_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head: for Llama, llama.cpp rotates neighbouring pairs, transformers the halves."""
    return rows.reshape(num_heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _check_token_ids(tokenizer: PreTrainedTokenizerBase, read: PreTrainedTokenizerBase) -> None:
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    plain = [token for token in added if token.isascii() and token.isprintable() and " " not in token]
    for text in (*TEXTS, *(f"a {token} b{token}c" for token in plain)):  # transformers does not read the other tokens
        expected, found = (one.encode(text, add_special_tokens=False) for one in (tokenizer, read))
        if expected != found:
            raise ValueError(f"the token ids of {text!r} are {expected}, but in the written file {found}.")
