"""Log-probs and values of a model in float64, one row at a time."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from alphaapollo.plugins.verify.reference.samples import Config, Recorded


class Float64(TorchFunctionMode):
    """Context manager in which transformers' casts to float32 return float64, and routers choose recorded experts."""

    experts: Tensor | None = None  # [T, k], of the current layer

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        swap = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        if function is Tensor.float:
            return args[0].double()
        if function in (torch.topk, Tensor.topk) and self.experts is not None:
            return torch.return_types.topk((args[0].gather(-1, self.experts), self.experts))
        return function(*map(swap, args), **{name: swap(value) for name, value in (kwargs or {}).items()})


def load_model(config: Config, path: str, dtype: str, state: dict[str, Tensor], prefix: str) -> Any:
    """Load a model, and replace its parameters by those of a recorded state, whose names begin with `prefix`. dtype:
    of the run's forward passes, to which frozen weights were rounded."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    kind: Any = transformers.AutoModelForCausalLM
    settings = transformers.AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    if hasattr(settings, "vision_config"):
        kind = transformers.AutoModelForImageTextToText
    options: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": "auto"}
    if hasattr(settings, "quantization_config"):  # frozen weights of 4 bits
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    model = kind.from_pretrained(path, trust_remote_code=config.trust_remote_code, **options).eval()
    model = model.to(getattr(torch, dtype)).double().requires_grad_(False)
    named = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    if lora := sorted({re.split(r"\.lora_[AB]\.", name)[0] for name in named if ".lora_" in name}):
        from peft import LoraConfig, inject_adapter_in_model

        alpha = 16 if config.lora_alpha is None else config.lora_alpha
        inject_adapter_in_model(LoraConfig(r=config.lora_rank, lora_alpha=alpha, target_modules=lora), model)
        model = model.double().requires_grad_(False)
    if "value_head.weight" in named:  # a critic
        model.value_head = nn.Linear(named["value_head.weight"].shape[1], 1)
    parameters = dict(model.named_parameters())
    for name, tensor in named.items():
        if name not in parameters and name in model.state_dict():
            continue  # tied to another parameter
        parameters[name].data = tensor.double()
        parameters[name].requires_grad_(True)
    return model


class WeightVector:
    """Trained weights of a model as one vector, which may have a graph. [n]"""

    def __init__(self, model: nn.Module):
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        places = [(m, leaf, p) for m in model.modules() for leaf, p in m._parameters.items()]
        self.places = {n: [(m, leaf) for m, leaf, q in places if q is p] for n, p in self.trained.items()}
        self.start = torch.cat([p.detach().flatten() for p in self.trained.values()])

    def set(self, vector: Tensor) -> None:
        """Replace the parameters by parts of a vector."""
        parts = vector.split([p.numel() for p in self.trained.values()])
        for (name, parameter), part in zip(self.trained.items(), parts, strict=True):
            for module, leaf in self.places[name]:
                module._parameters.pop(leaf, None)
                setattr(module, leaf, part.view_as(parameter))

    def restore(self, vector: Tensor) -> None:
        """Put the parameters back, with the values of a vector."""
        parts = vector.detach().split([p.numel() for p in self.trained.values()])
        for (name, parameter), part in zip(self.trained.items(), parts, strict=True):
            parameter.data.copy_(part.view_as(parameter))
            for module, leaf in self.places[name]:
                delattr(module, leaf)
                module._parameters[leaf] = parameter


def run_row(model: Any, row: Recorded, mode: Float64) -> Tensor:
    """Return the last hidden states that predict the sampled tokens of a row, [T, H]."""
    inputs: dict[str, Any] = {"input_ids": torch.tensor([[*row.token_ids]]), "use_cache": False}
    for name in row.images[0].tensors if row.images else ():
        inputs[name] = torch.from_numpy(np.concatenate([image.tensors[name] for image in row.images]))
    if row.images:
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == row.images[0].placeholder_id).int()
    experts = row.columns.get("routed_experts")
    base = getattr(model, "base_model", model)
    decoder = base.get_decoder() if row.images else base
    hooks = []
    for number, layer in enumerate(decoder.layers) if experts is not None else ():
        chosen = torch.from_numpy(experts[:, number].astype(np.int64))
        hooks.append(layer.register_forward_pre_hook(lambda *_, chosen=chosen: setattr(mode, "experts", chosen)))
    with mode:
        states = base(**inputs).last_hidden_state[0]
    mode.experts = None
    for hook in hooks:
        hook.remove()
    sampled = np.flatnonzero(np.asarray(row.action_mask))
    return states[torch.from_numpy(sampled) - 1]


def token_logprobs(model: Any, row: Recorded, temperature: float, excluded: tuple[int, ...]) -> Tensor:
    """Return the log-probs of all tokens at each sampled position of a row, [T, V]."""
    text = model.config.get_text_config()
    states = run_row(model, row, Float64())
    logits = model.get_output_embeddings()(states)
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        logits = logits * (getattr(text, name, None) or 1.0)
    logits = logits / (getattr(text, "logits_scaling", None) or 1.0)
    if cap := getattr(text, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    never = torch.tensor([token for token in excluded if token < logits.shape[1]], dtype=torch.int64)
    return (logits.index_fill(1, never, -1e9) / temperature).log_softmax(-1)


def among_kept(logprobs: Tensor, kept: list[list[int]]) -> Tensor:
    """Renormalize log-probs [T, V] over the tokens that the sampler kept at each position: -1e9 for others, so that
    they count as 0. An empty list stands for all tokens."""
    left_out = torch.zeros_like(logprobs, dtype=torch.bool)
    for position, tokens in enumerate(kept):
        left_out[position, tokens] = True
        left_out[position] ^= bool(tokens)
    return logprobs.masked_fill(left_out, -1e9).log_softmax(-1)


def find_kept(logprobs: Tensor, top_p: float, top_k: int, min_p: float) -> Tensor:
    """Return which tokens a sampler keeps: those with at least min_p of the largest probability, of them the top_k most
    probable ones, and of them the fewest whose renormalized probabilities add up to top_p. [T, V] -> bool [T, V]"""
    ordered, order = logprobs.sort(descending=True)
    kept = ordered.exp() >= min_p * ordered[:, :1].exp()
    kept[:, top_k if top_k > 0 else ordered.shape[1] :] = False
    probs = ordered.exp() * kept
    before = probs.cumsum(1) - probs
    if top_p < 1:
        kept &= before < top_p * probs.sum(1, keepdim=True)
    return torch.zeros_like(kept).scatter(1, order, kept)


def of_sampled(logprobs: Tensor, row: Recorded) -> Tensor:
    """Select the log-probs of the sampled tokens, [T]."""
    tokens = np.asarray(row.token_ids)[np.flatnonzero(np.asarray(row.action_mask))]
    return logprobs.gather(1, torch.from_numpy(tokens.astype(np.int64))[:, None])[:, 0]


def values(model: Any, row: Recorded) -> Tensor:
    """Return the critic's value before each sampled token, [T]."""
    result: Tensor = model.value_head(run_row(model, row, Float64()))[:, 0]
    return result
