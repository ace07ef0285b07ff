"""Conversion of a GGUF file, as llama.cpp reads it, to a Hugging Face model folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from alphaapollo.models.checkpoint import explain_write_errors
from alphaapollo.models.load import check_layers

TOKENIZER_BYTES = 64 * 2**20  # upper bound for the files beside the weights


def import_gguf(file: Path, folder: Path) -> int:
    """Write the model of a GGUF file to a new `folder`: dequantized weights in float32, tokenizer with special tokens
    and chat template, and generation_config.json. Returns the number of parameters. Needs the package gguf.

    Raises:
        ValueError: the file is damaged, or its family or its quantization is not supported, or `folder` exists.
        OSError: the file cannot be read, or the disk has not enough space. No incomplete `folder` remains.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.quantizers.auto import GgufConfig

    if folder.exists():
        raise ValueError(f"{folder} already exists. Remove it, or choose another folder.")
    architecture, num_weights = _check_file(file)
    source: dict[str, Any] = {"pretrained_model_name_or_path": file.absolute().parent, "gguf_file": file.name}
    try:
        config = AutoConfig.from_pretrained(**source)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError("it is not a causal language model")
        check_layers(config, str(file), "padded")
    except Exception as error:  # those of transformers
        raise ValueError(f"{file} has the model family {architecture!r}, which is not supported ({error}). Choose a "
                         "model of another family, e.g. Llama, Qwen3 or Gemma 3.") from error  # fmt: skip
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    needed, free = 4 * num_weights + TOKENIZER_BYTES, shutil.disk_usage(existing).free
    if free < needed:
        raise OSError(f"{folder} needs {needed / 2**20:.0f} MiB, but {existing} has {free / 2**20:.0f} MiB free. Free "
                      "disk space, or choose a folder on another disk.")  # fmt: skip
    try:
        plain = GgufConfig(dequantize=True)
        model, info = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, quantization_config=plain, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # those of transformers, tokenizers and gguf
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"{file} cannot be converted ({reason}). Download it again, or choose another file."
        ) from error
    if info["missing_keys"]:  # transformers initializes them randomly
        raise ValueError(f"{file} has no weights for {min(info['missing_keys'])}. Download the file again.")
    with explain_write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as part:
            written = Path(part, "model")
            model.save_pretrained(written)
            tokenizer.save_pretrained(written)
            for weights in written.glob("*.safetensors"):  # safetensors makes them readable only by their owner
                shutil.copymode(written / "config.json", weights)
            written.rename(folder)
    return int(model.num_parameters())


def _check_file(file: Path) -> tuple[str, int]:
    """Return family and number of weights of a GGUF file. Raises ValueError if the file is damaged or its quantization
    cannot be read."""
    try:
        from gguf import GGUFReader, dequantize
    except ImportError:
        raise ValueError("import-gguf needs the package gguf. Install it: pip install -e '.[gguf]'") from None
    try:
        reader = GGUFReader(file)
        architecture = str(reader.fields["general.architecture"].contents())
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"{file} is not a complete GGUF file ({error}). Download it again.") from error
    for tensor in {tensor.tensor_type: tensor for tensor in reader.tensors}.values():
        try:
            dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError:
            raise ValueError(f"{file} has weights of type {tensor.tensor_type.name}, which transformers cannot read. "
                             "Choose another quantization, e.g. Q4_K_M, Q8_0 or F16.") from None  # fmt: skip
    return architecture, sum(int(tensor.n_elements) for tensor in reader.tensors)
