"""Conversion of a GGUF file, as llama.cpp reads it, to a Hugging Face model folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from alphaapollo.config.schema import Model
from alphaapollo.models.checkpoint import explain_write_errors
from alphaapollo.models.export import check_written_model
from alphaapollo.utils.disk import open_regular

MAX_VALUES = 20_000_000  # in the header of a file, of which a vocabulary has most


def import_gguf(file: Path, folder: Path) -> int:
    """Write the model of a GGUF file to a new `folder`: dequantized weights in float32, tokenizer with special tokens
    and chat template, and generation_config.json. Returns the number of parameters. Needs the package gguf.

    Raises:
        ValueError: the file is damaged, or its family or its quantization is not supported, or `folder` exists.
        OSError: the file cannot be read, or the disk has not enough space. No incomplete `folder` remains.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if folder.exists():
        raise ValueError(f"{folder} already exists. Remove it, or choose another folder.")
    family, num_weights, num_tensors = _check_file(file)
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    needed, free = 4 * num_weights + 64 * 2**20, shutil.disk_usage(existing).free  # weights and tokenizer
    if free < needed:
        raise OSError(f"{folder} needs {needed >> 20} MiB, but {existing} has {free >> 20} MiB free. Free disk space.")
    source: dict[str, Any] = {"pretrained_model_name_or_path": file.absolute().parent, "gguf_file": file.name}
    options = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    try:
        config = AutoConfig.from_pretrained(**source)
        if config.num_hidden_layers > num_tensors:
            raise ValueError(f"no weights for most of its {config.num_hidden_layers} layers")
        with torch.device("meta"):
            described = AutoModelForCausalLM.from_config(config).num_parameters()
        if described > 2 * num_weights:  # fewer missing weights are named below
            raise ValueError(f"it describes {described:,} weights, and has {num_weights:,}")
        model, info = AutoModelForCausalLM.from_pretrained(**source, **options, output_loading_info=True)
        if info["missing_keys"]:  # transformers initializes them randomly
            raise ValueError(f"no weights for {min(info['missing_keys'])}")
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # those of transformers, tokenizers and gguf, e.g. for an unsupported family
        raise ValueError(f"{file} ({family}) cannot be converted: {error}. Choose another model.") from error
    with explain_write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as part:
            written = Path(part, "model")
            model.save_pretrained(written)
            tokenizer.save_pretrained(written)
            check_written_model(model, written, Model(path=str(written)))
            for weights in written.glob("*.safetensors"):  # safetensors makes them readable only by their owner
                shutil.copymode(written / "config.json", weights)
            written.rename(folder)
    return int(model.num_parameters())


def _check_file(file: Path) -> tuple[str, int, int]:
    """Return family, weights and tensors. Raises ValueError for a damaged file or an unsupported quantization."""
    try:
        from gguf import GGUFReader, dequantize
    except ImportError:
        raise ValueError("import-gguf needs the package gguf. Install it: pip install -e '.[gguf]'") from None

    class Reader(GGUFReader):
        num_reads = 0

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            self.num_reads += 1
            if self.num_reads > MAX_VALUES or int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("a length in its header is too large")
            return super()._get(offset, dtype, count, override_order)

    try:
        with open_regular(file.resolve()):  # a pipe would never end
            reader = Reader(file)
        family = str(reader.fields["general.architecture"].contents())[:40]
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{file} is not a complete GGUF file ({error}). Download it again.") from error
    for tensor in {tensor.tensor_type: tensor for tensor in reader.tensors}.values():
        try:
            dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError:
            kind = f"weights of type {tensor.tensor_type.name}, which transformers cannot read"
            raise ValueError(f"{file} has {kind}. Choose another quantization, e.g. Q4_K_M or Q8_0.") from None
    return family, sum(int(tensor.n_elements) for tensor in reader.tensors), len(reader.tensors)
