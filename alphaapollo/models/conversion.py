"""Hugging Face folders of an adapter merged into its base model, and of a checkpoint of verl."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from alphaapollo.config.schema import Model
from alphaapollo.data.rendering import load_tokenizer
from alphaapollo.models.export import (
    check_exported_outputs,
    compute_outputs,
    compute_transformers_outputs,
    make_probe_tokens,
    write_folder,
)
from alphaapollo.models.load import load_causal_lm, load_config


def write_merged_model(adapter: Path, folder: Path, dtype: str = "auto", base_path: str = "") -> None:
    """Write the Hugging Face folder of an adapter's base model with the adapter merged in. dtype: auto = that of the
    base model. base_path: base model, if it has moved. Raises ValueError if one of both cannot be read, or if the
    log-probs of a text differ before and after merging, or in the written folder."""
    from peft import PeftConfig, PeftModel
    from peft.utils import load_peft_weights

    base = Model(path=base_path or PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path or "")
    loaded = load_causal_lm(base, "padded")
    chosen, tokens = loaded.dtype if dtype == "auto" else getattr(torch, dtype), make_probe_tokens(loaded.config)
    try:
        embeddings = loaded.get_input_embeddings().weight
        name = next(name for name, parameter in loaded.named_parameters() if parameter is embeddings)
        new = load_peft_weights(str(adapter), device="cpu").get(f"base_model.model.{name}", embeddings)
        if len(new) != len(embeddings):
            loaded.resize_token_embeddings(len(new), mean_resizing=False)
        adapted: Any = PeftModel.from_pretrained(loaded.float(), str(adapter)).eval()
        expected = compute_outputs(adapted, "policy", tokens)
        merged = adapted.merge_and_unload()
        check_exported_outputs(expected, compute_outputs(merged, "policy", tokens), torch.float32)
        for parameter in merged.parameters():  # not the frequencies of position embeddings
            parameter.data = parameter.data.to(chosen)
        merged.save_pretrained(folder)
        rounded = compute_outputs(merged.float(), "policy", tokens)
        check_exported_outputs(rounded, compute_transformers_outputs(folder, "policy", tokens, base), torch.float32)
    except (RuntimeError, ValueError, AttributeError) as error:  # those of peft, e.g. for an adapter without a merge
        raise ValueError(f"{adapter} cannot be merged into {base.path}: {error}") from error
    has_tokenizer = (adapter / "tokenizer_config.json").is_file()
    load_tokenizer(str(adapter) if has_tokenizer else base.path).save_pretrained(folder)


def write_verl_model(shards: Sequence[Path], folder: Path, dtype: str = "auto") -> None:
    """Write the Hugging Face folder of the shards that verl's FSDP ranks saved, in the order of the ranks. dtype: auto
    = that of the shards. Raises ValueError if shards or weights are missing, or are not those of a complete model."""
    source = Model(path=str(shards[0].parent / "huggingface"))
    try:
        if len(shards) != (size := int(shards[0].name.split("_")[3])):
            raise ValueError(f"{len(shards)} of {size} shards exist")
        tensors = dict(_join_shards([torch.load(shard, map_location="cpu", weights_only=True) for shard in shards]))
        if found := next((name for name in tensors if ".base_layer." in name or ".lora_" in name), ""):
            raise ValueError(f"it has adapters ({found}), which are merged by `python -m verl.model_merger merge`")
        chosen = next(iter(tensors.values())).dtype if dtype == "auto" else getattr(torch, dtype)
        write_folder(
            folder, {name: one.to(chosen) for name, one in tensors.items()}, load_config(source), chosen, source
        )
        load_causal_lm(Model(path=str(folder)), "padded")
    except Exception as error:  # those of torch for a damaged file, or for types other than tensors
        raise ValueError(f"{shards[0].parent}: cannot convert the checkpoint of verl: {error}") from error


def _join_shards(states: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and the complete tensors of the state dicts of all ranks."""
    for name, first in states[0].items():
        parts = [state[name] for state in states]
        if isinstance(first, DTensor):
            parts = [part.to_local() for part in parts]
            for size, how in zip(reversed(first.device_mesh.mesh.shape), reversed(first.placements), strict=True):
                if type(how) not in (Shard, Replicate):
                    raise ValueError(f"{name} is sharded as {how}")
                groups = [parts[start : start + size] for start in range(0, len(parts), size)]
                parts = [torch.cat(group, how.dim) if isinstance(how, Shard) else group[0] for group in groups]
        yield name, parts[0]
