"""Write a model of the Llama family as a GGUF file, to test that llama.cpp computes the same.

python -m tests.loop.gguf_export MODEL ORIGINAL.gguf OUT.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file


def export_gguf(model: Path, original: Path, file: Path) -> None:
    """Write the weights of a Hugging Face folder in float32, with the metadata (sizes, tokenizer, chat template) of the
    GGUF file from which the model was made."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFReader, GGUFWriter, LlamaFileType, get_tensor_name_map

    reader = GGUFReader(original)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert fields.pop("general.architecture").contents() == MODEL_ARCH_NAMES[MODEL_ARCH.LLAMA]
    fields.pop("general.file_type")
    heads = {
        "q_proj": fields["llama.attention.head_count"].contents(),
        "k_proj": fields["llama.attention.head_count_kv"].contents(),
    }
    writer = GGUFWriter(file, MODEL_ARCH_NAMES[MODEL_ARCH.LLAMA])
    writer.add_file_type(LlamaFileType.ALL_F32)
    for name, field in fields.items():
        kinds = field.types if len(field.types) > 1 else [field.types[0], None]
        writer.add_key_value(name, field.contents(), kinds[0], sub_type=kinds[-1])
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, fields["llama.block_count"].contents())
    for name, weight in load_file(model / "model.safetensors").items():
        found = names.get_name(name, try_suffixes=(".weight",))
        assert found is not None, name
        for kind, num_heads in heads.items():
            if kind in name:
                weight = interleave_rotary_halves(weight, num_heads)
        writer.add_tensor(found, weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave_rotary_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of each head: llama.cpp rotates neighbouring pairs, transformers the halves of a head."""
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()


if __name__ == "__main__":
    export_gguf(*map(Path, sys.argv[1:]))
