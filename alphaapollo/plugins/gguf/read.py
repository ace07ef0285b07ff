"""Conversion of a GGUF file, as llama.cpp reads it, to a Hugging Face model folder."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from alphaapollo.config.schema import Model
from alphaapollo.models.checkpoint import explain_write_errors
from alphaapollo.models.export import check_written_model
from alphaapollo.utils.disk import open_regular

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

MAX_VALUES = 20_000_000  # in the header of a file, of which a vocabulary has most
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def import_gguf(file: Path, folder: Path) -> int:
    """Write the model of a GGUF file to a new `folder`: dequantized weights in float32, tokenizer with special tokens
    and chat template, and generation_config.json. Returns the number of parameters. Needs the package gguf.

    Raises:
        ValueError: the file is damaged, or its family or its quantization is not supported, or `folder` exists.
        OSError: the file cannot be read, or the disk has not enough space. No incomplete `folder` remains.
    """
    if folder.exists():
        raise ValueError(f"{folder} already exists. Remove it, or choose another folder.")
    reader = open_gguf(file)
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    needed, free = 4 * _count_weights(reader) + 64 * 2**20, shutil.disk_usage(existing).free  # weights and tokenizer
    if free < needed:
        raise OSError(f"{folder} needs {needed >> 20} MiB, but {existing} has {free >> 20} MiB free. Free disk space.")
    model, tokenizer = load_gguf(file, reader)
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


def load_gguf(file: Path, reader: GGUFReader) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model of a GGUF file, with dequantized weights in float32, and its tokenizer. reader: open_gguf(file).
    Raises ValueError if its family is not supported, or weights are missing."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: dict[str, Any] = {"pretrained_model_name_or_path": file.absolute().parent, "gguf_file": file.name}
    options = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    num_weights = _count_weights(reader)
    try:
        config = AutoConfig.from_pretrained(**source)
        _complete_config(config, reader)
        if config.num_hidden_layers > len(reader.tensors):
            raise ValueError(f"no weights for most of its {config.num_hidden_layers} layers")
        with torch.device("meta"):
            described = AutoModelForCausalLM.from_config(config).num_parameters()
        if described > 2 * num_weights:  # fewer missing weights are named below
            raise ValueError(f"it describes {described:,} weights, and has {num_weights:,}")
        options |= {"config": config, "output_loading_info": True}
        model, info = AutoModelForCausalLM.from_pretrained(**source, **options)
        if info["missing_keys"]:  # transformers initializes them randomly
            raise ValueError(f"no weights for {min(info['missing_keys'])}")
        return model.eval(), AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # those of transformers, tokenizers and gguf, e.g. for an unsupported family
        raise ValueError(
            f"{file} ({_read_family(reader)}) cannot be converted: {error}. Choose another model."
        ) from error


def _complete_config(config: PretrainedConfig, reader: GGUFReader) -> None:
    """Set what transformers does not read: head_dim of Qwen3, and the frequencies of Llama 3's RoPE."""
    if config.model_type == "qwen3" and (field := reader.get_field("qwen3.attention.key_length")):
        config.head_dim = field.contents()
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is not None and config.model_type == "llama":
        config.rope_parameters |= LLAMA3_ROPE | {"factor": float(factors.max())}
        if not np.allclose(factors, compute_rope_factors(config)):
            raise ValueError("its RoPE frequencies (rope_freqs.weight) are not those of Llama 3")


def compute_rope_factors(config: PretrainedConfig) -> np.ndarray:
    """Compute the divisors of the frequencies of RoPE for Llama 3's longer context [head_dim / 2]."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(len(frequencies)) / len(frequencies)
    return (config.rope_parameters["rope_theta"] ** -exponents / frequencies).float().numpy()


def require_gguf_package() -> None:
    """Raise ValueError if the package gguf is not installed."""
    if find_spec("gguf") is None:
        raise ValueError("GGUF files need the package gguf. Install it: pip install -e '.[gguf]'")


def _count_weights(reader: GGUFReader) -> int:
    return sum(int(tensor.n_elements) for tensor in reader.tensors)


def _read_family(reader: GGUFReader) -> str:
    return str(reader.fields["general.architecture"].contents())[:40]


def open_gguf(file: Path) -> GGUFReader:
    """Read the header of a GGUF file. Raises ValueError for a damaged file or an unsupported quantization."""
    require_gguf_package()
    from gguf import GGUFReader, dequantize

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
        _read_family(reader)
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{file} is not a complete GGUF file ({error}). Download it again.") from error
    for tensor in {tensor.tensor_type: tensor for tensor in reader.tensors}.values():
        try:
            dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError:
            kind = f"weights of type {tensor.tensor_type.name}, which transformers cannot read"
            raise ValueError(f"{file} has {kind}. Choose another quantization, e.g. Q4_K_M or Q8_0.") from None
    return reader
