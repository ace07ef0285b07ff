"""Export of sharded models: parameters for the engines, Hugging Face folders, and the verification of a folder."""

from __future__ import annotations

import copy
import logging
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from alphaapollo.config.schema import LoraForm, Model
from alphaapollo.data.images import EXCLUDED_LOGIT, find_placeholder_ids, reads_images
from alphaapollo.data.rendering import make_template_digest
from alphaapollo.data.vocabulary import find_generation_config, load_tokenizer
from alphaapollo.models import lora
from alphaapollo.models.checkpoint import explain_write_errors
from alphaapollo.models.decoder import find_decoder_layers, replace_placeholder_ids
from alphaapollo.models.load import has_custom_code, load_causal_lm, load_config
from alphaapollo.models.quantized import list_weight_names, read_quantization
from alphaapollo.models.sharding import full_tensor
from alphaapollo.models.weight_writer import write_weights
from alphaapollo.utils.hub import is_adapter
from alphaapollo.utils.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from alphaapollo.models.policy import ValueModel


ModelKind = Literal["policy", "reward model", "critic"]
AUTO_CLASSES: dict[ModelKind, str] = {
    "policy": "AutoModelForCausalLM",
    "reward model": "AutoModelForSequenceClassification",
    "critic": "AutoModelForTokenClassification",
}
OUTPUT_NAMES: dict[ModelKind, str] = {"policy": "log-probs", "reward model": "scores", "critic": "values"}
PROBE_TOKENS = 64
TOLERANCES = {torch.float32: 5e-5, torch.bfloat16: 0.2}
"""Allowed mean |difference| from rounding the weights, relative to 1 + the mean absolute value."""


@torch.no_grad()
def gather_parameters(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all parameters, gathered by layer, in `dtype` (a collective: every rank must exhaust it).
    Names are those of a Hugging Face checkpoint. Tied parameters are yielded once. LoRA adapters are merged into the
    weights."""
    lora_layers = lora.get_lora_layers(model)

    def gather(name: str, own: Tensor) -> Tensor:
        weight = lora.merge_lora_weight(lora_layers[name]) if name in lora_layers else own.detach()
        return full_tensor(weight.to(dtype))

    yield from _convert_parameters(model, gather)


def list_parameters(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what gather_parameters yields, on the meta device."""
    return dict(_convert_parameters(model, lambda _, own: torch.empty(own.shape, dtype=dtype, device="meta")))


def _convert_parameters(
    model: PreTrainedModel, get_tensor: Callable[[str, Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a Hugging Face checkpoint, by layer. get_tensor: (name, parameter) -> complete tensor."""
    from transformers.core_model_loading import revert_weight_conversion

    for names in _group_parameter_names_by_layer(model):
        gathered = {}
        for name in names:
            if not lora.is_adapter_parameter(name):
                layer, _, key = name.rpartition(".")
                own: Tensor = getattr(model.get_submodule(layer), key)
                gathered[lora.get_base_parameter_name(name)] = get_tensor(name, own)
        for name, tensor in revert_weight_conversion(model, gathered).items():
            if model.config.model_type == "qwen3_vl_moe" and ".experts." in name:
                tensor = tensor.transpose(1, 2)  # as in published checkpoints; transformers loads both orientations
            owns_memory = tensor.untyped_storage().nbytes() == tensor.nbytes
            yield name, tensor.contiguous() if owns_memory else tensor.clone()  # safetensors does not accept views


def export_model(folder: str, model: PreTrainedModel, source: Model, dtype: torch.dtype, lora_form: LoraForm) -> None:
    """Write a Hugging Face folder with weights and configuration, and with tokenizer and modeling code of the model
    `source`, atomically (a collective; rank 0 writes). lora_form=adapter: only the LoRA adapters, as a peft folder.
    Raises OSError, e.g. if the disk is full."""
    final = Path(folder)
    partial = final.with_name(f".writing_{final.name}")
    is_writer = dist.get_rank() == 0
    with explain_write_errors(Path(folder)):
        if is_writer:
            shutil.rmtree(partial, ignore_errors=True)
        if lora_form == "adapter":
            tensors = {name: tensor.cpu() for name, tensor in lora.gather_adapter(model)}
            if is_writer:
                lora.write_adapter(partial, model, tensors, source.path)
                path = source.tokenizer_path or source.path
                load_tokenizer(path, source.trust_remote_code).save_pretrained(partial)
        elif is_writer:
            persistent = model.state_dict().keys()
            buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
            shapes = list_parameters(model, dtype) | {name: buffer.to("meta") for name, buffer in buffers.items()}
            write_weights(partial, shapes, chain(gather_parameters(model, dtype), buffers.items()))
            config = copy.deepcopy(model.config)
            config.architectures = [type(model).__name__]
            write_folder(partial, None, config, dtype, source)
        else:
            deque(gather_parameters(model, dtype), maxlen=0)
        if is_writer:
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
    dist.barrier()


def export_critic(folder: str, critic: ValueModel, source: Model, dtype: torch.dtype) -> None:
    """Write a critic to a new folder, as a token classifier with one label and a float32 head. Needs a single rank.
    Raises ValueError if transformers has no token classifier for the model, OSError if the disk is full."""
    from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

    config = copy.deepcopy(critic.model.config)
    kind = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is None:
        raise ValueError(
            f"cannot export the critic: transformers has no token classifier for {config.model_type!r} models."
        )
    config.num_labels, config.architectures = 1, [kind.__name__]
    with explain_write_errors(Path(folder)):
        prefix = kind.base_model_prefix
        tensors = {f"{prefix}.{name}": tensor.cpu() for name, tensor in gather_parameters(critic.model, dtype)}
        for name, parameter in critic.value_head.named_parameters():
            tensors[f"score.{name}"] = full_tensor(parameter.detach()).float().cpu()
        write_folder(Path(folder), tensors, config, dtype, source)


def write_folder(
    folder: Path, tensors: dict[str, Tensor] | None, config: PretrainedConfig, dtype: torch.dtype, source: Model
) -> None:
    """Write weights and configuration to a Hugging Face folder, and copy modeling code, generation_config.json,
    tokenizer and processor of `source`. tensors: None if the folder has the weights."""
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoProcessor, AutoTokenizer

    if tensors is not None:
        folder.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(tensors, folder)
    path = source.tokenizer_path or source.path
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=source.trust_remote_code)
    if reads_images(config):
        processor = AutoProcessor.from_pretrained(source.path, trust_remote_code=source.trust_remote_code)
        tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
        processor.tokenizer, processor.chat_template = tokenizer, tokenizer.chat_template
        processor.save_pretrained(folder)
    else:
        tokenizer.save_pretrained(folder)
    config.dtype, config.chat_template_digest = dtype, make_template_digest(tokenizer)
    for name in config.sub_configs:  # sections of the language model and the vision tower
        getattr(config, name).dtype = dtype
    config.save_pretrained(folder)
    code = Path(source.path).glob("*.py")  # modeling code that is part of the model folder
    for file in filter(None, [*code, find_generation_config(source.path)]):
        shutil.copyfile(file, folder / file.name)
    for weights in folder.glob("*.safetensors"):  # safetensors makes them readable only by their owner
        shutil.copymode(folder / "config.json", weights)


def _group_parameter_names_by_layer(model: PreTrainedModel) -> list[list[str]]:
    """Return the names of all parameters: one list per decoder layer, and one for the other parameters."""
    layers = {id(layer) for layer in find_decoder_layers(model)}
    prefixes = [f"{name}." for name, module in model.named_modules() if id(module) in layers]
    groups: dict[str, list[str]] = {}
    for name in list_weight_names(model):
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        groups.setdefault(prefix, []).append(name)
    return list(groups.values())


def make_probe_tokens(config: PretrainedConfig) -> list[int]:
    """Return fixed random token ids for comparing an exported model with its checkpoint. The last is not padding."""
    size, padding = config.get_text_config().vocab_size, config.get_text_config().pad_token_id
    generator = torch.Generator().manual_seed(derive_seed(0, "export_probe"))
    tokens = [int(token) for token in torch.randint(size, (PROBE_TOKENS,), generator=generator)]
    if tokens[-1] == padding:  # classifiers would ignore it
        tokens[-1] = (padding + 1) % size
    return [int(token) for token in replace_placeholder_ids(np.array(tokens), find_placeholder_ids(config))]


def compute_transformers_outputs(folder: Path, kind: ModelKind, token_ids: list[int], source: Model) -> list[float]:
    """Compute the outputs of an exported model (see compute_outputs) with transformers only, in float32. Adapters are
    loaded on their base model."""
    import transformers

    config = load_config(source)
    is_vision_model = reads_images(config) and not has_custom_code(source, config)
    auto_class = getattr(transformers, "AutoModelForImageTextToText" if is_vision_model else AUTO_CLASSES[kind])
    options: dict[str, object] = {"dtype": torch.float32, "trust_remote_code": source.trust_remote_code}
    if is_adapter(folder) and read_quantization(config):  # peft adapts no layers that are dequantized later
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        loaded = auto_class.from_pretrained(folder, **options).eval()
    return compute_outputs(loaded, kind, token_ids)


@torch.no_grad()
def compute_outputs(model: PreTrainedModel, kind: ModelKind, token_ids: list[int]) -> list[float]:
    """Compute the outputs of a model of transformers or peft on T `token_ids`: a policy's T - 1 log-probs, a critic's
    T - 1 values, or a reward model's score."""
    logits = model(input_ids=torch.tensor([token_ids])).logits[0].float()
    if kind == "policy":
        logits[:, list(find_placeholder_ids(model.config))] = EXCLUDED_LOGIT
        logits = logits[:-1].log_softmax(-1).gather(1, torch.tensor(token_ids[1:]).unsqueeze(1))
    elif kind == "critic":
        logits = logits[:-1]
    return [float(value) for value in logits.flatten()]


def check_exported_outputs(expected: list[float], exported: list[float], dtype: torch.dtype) -> float:
    """Return the mean |difference| between the outputs of a checkpoint and of the model exported from it. Raises
    ValueError if it is larger than the rounding of weights to `dtype` explains."""
    reference = torch.tensor(expected)
    difference = float((reference - torch.tensor(exported)).abs().mean())
    allowed = TOLERANCES[dtype] * (1 + float(reference.abs().mean()))
    if not difference <= allowed:  # also true for NaN
        raise ValueError(
            f"the outputs of the written model differ from the original's by {difference:.1e} on average, but rounding "
            f"explains only {allowed:.0e}. The result is discarded."
        )
    return difference


def check_written_model(model: PreTrainedModel, folder: Path, source: Model) -> None:
    """Raise ValueError if the log-probs of a language model and of the folder written from it differ (in float32)."""
    tokens = make_probe_tokens(model.config)
    written = compute_transformers_outputs(folder, "policy", tokens, source)
    check_exported_outputs(compute_outputs(model, "policy", tokens), written, torch.float32)


def write_merged_model(
    adapter: Path, folder: Path, dtype: str = "auto", base_path: str = "", trusts_code: bool = False
) -> None:
    """Write the Hugging Face folder of an adapter's base model with the adapter merged in. dtype: auto = that of the
    base model. base_path: base model, if it has moved. Raises ValueError if adapter or base model cannot be read, or if
    the log-probs of a text differ before and after merging, or in the written folder."""
    try:
        adapted, base, base_dtype = lora.load_adapter(adapter, base_path, trusts_code)
        tokens = make_probe_tokens(adapted.config)
        expected = compute_outputs(adapted, "policy", tokens)
        merged = adapted.merge_and_unload()
        check_exported_outputs(expected, compute_outputs(merged, "policy", tokens), torch.float32)
        for parameter in merged.parameters():  # but not buffers, e.g. frequencies of position embeddings
            parameter.data = parameter.data.to(base_dtype if dtype == "auto" else getattr(torch, dtype))
        merged.save_pretrained(folder)
        check_written_model(merged.float(), folder, base)
    except (RuntimeError, ValueError, AttributeError, TypeError, LookupError) as error:  # also errors of peft
        raise ValueError(f"{adapter} cannot be merged into its base model: {error}") from error
    has_tokenizer = (adapter / "tokenizer_config.json").is_file()
    load_tokenizer(str(adapter) if has_tokenizer else base.path, trusts_code).save_pretrained(folder)


def write_verl_model(shards: Sequence[Path], folder: Path, dtype: str = "auto", trusts_code: bool = False) -> None:
    """Write the Hugging Face folder of the shards that verl's FSDP ranks saved, in the order of the ranks. dtype: auto
    = that of the shards. Raises ValueError if shards or weights are missing, or are not those of a complete model."""
    config_folder = shards[0].parent / "huggingface"
    path = config_folder if config_folder.is_dir() else shards[0].parent
    source = Model(path=str(path), trust_remote_code=trusts_code)
    try:
        if len(shards) != (size := int(shards[0].name.split("_")[3])):  # model_world_size_8_rank_0.pt
            raise ValueError(f"{len(shards)} of {size} shards exist")
        logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)  # there is no process group
        states = [torch.load(shard, map_location="cpu", weights_only=True) for shard in shards]
        tensors = {name: _join_shards([state[name] for state in states]) for name in states[0]}
        target_dtype = next(iter(tensors.values())).dtype if dtype == "auto" else getattr(torch, dtype)
        tensors = {name: tensor.to(target_dtype) for name, tensor in tensors.items()}
        write_folder(folder, tensors, load_config(source), target_dtype, source)
        load_causal_lm(source.model_copy(update={"path": str(folder)}), "padded")
    except Exception as error:  # errors of torch for a damaged file, or for types other than tensors
        reason = str(error).split(". ")[0]  # torch's advice is to load the file without a check
        fix = "If its files are complete, convert it with `python -m verl.model_merger merge`."
        raise ValueError(f"{shards[0].parent} of verl cannot be converted: {reason}. {fix}") from error


def write_converted_model(source: Path, folder: Path, dtype: str, trusts_code: bool = False) -> None:
    """Write a copy of a Hugging Face folder with its weights in another dtype. dtype: auto = an exact copy. Raises
    ValueError if the outputs of the copy differ by more than rounding explains."""
    if dtype == "auto":
        shutil.copytree(source, folder)
        return
    from safetensors.torch import load_file

    model, target_dtype = Model(path=str(source), trust_remote_code=trusts_code), getattr(torch, dtype)
    tensors = {name: t for file in sorted(source.glob("*.safetensors")) for name, t in load_file(file).items()}
    tensors = {name: t.to(target_dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    config = load_config(model)
    is_scorer = any("SequenceClassification" in name for name in config.architectures or ())
    kind: ModelKind = "reward model" if is_scorer else "policy"
    write_folder(folder, tensors, config, target_dtype, model)
    tokens = make_probe_tokens(config)
    expected, written = (compute_transformers_outputs(path, kind, tokens, model) for path in (source, folder))
    check_exported_outputs(expected, written, target_dtype)


def _join_shards(parts: list[Any]) -> Tensor:
    """Return the complete tensor, of which each rank saved a part. Joins parts along one mesh dimension at a time."""
    first = parts[0]
    if isinstance(first, DTensor):
        parts = [part.to_local() for part in parts]
        for size, placement in zip(reversed(first.device_mesh.mesh.shape), reversed(first.placements), strict=True):
            groups = [parts[start : start + size] for start in range(0, len(parts), size)]
            parts = [torch.cat(group, placement.dim) if isinstance(placement, Shard) else group[0] for group in groups]
        if parts[0].shape != first.shape or not {*map(type, first.placements)} <= {Shard, Replicate}:
            raise ValueError(f"placements {first.placements} are not supported")
    return cast("Tensor", parts[0])
