"""Policy model: log-probs of response tokens.

token ids -> decoder layers -> states that predict response tokens [n, H] -> head, in chunks -> log-probs [n]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from alphaapollo.algorithms import sampling
from alphaapollo.batching.batch import Rows
from alphaapollo.config.resolve import get_attention_kernel
from alphaapollo.config.schema import Model
from alphaapollo.data.images import EXCLUDED_LOGIT, find_placeholder_ids
from alphaapollo.data.vocabulary import find_excluded_ids
from alphaapollo.models import lora
from alphaapollo.models.attention import uses_alphaapollo_backend
from alphaapollo.models.decoder import (
    compute_hidden_states,
    find_decoder_layers,
    find_language_model,
    find_vision_modules,
    load_example_image,
    make_image_arguments,
    replace_placeholder_ids,
)
from alphaapollo.models.kept_logits import KeptLogits
from alphaapollo.models.lm_head import DivergenceTarget, LmHead, LmHeadInput, TokenStats, compute_token_stats
from alphaapollo.models.load import init_scalar_head, load_causal_lm
from alphaapollo.models.lora import load_trainable_lm
from alphaapollo.models.micro_batch import MicroBatch, MicroBatchBuilder, make_rows
from alphaapollo.models.moe_routing import RouterHooks
from alphaapollo.models.sharding import FsdpRoot, ModelMesh, shard_model
from alphaapollo.models.ulysses import gather_token_values
from alphaapollo.types import ImageInput
from alphaapollo.utils.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


# Allowed mean |difference| of the self-check, in nats. Logits can be near 30, where bfloat16 has steps of 0.125. In
# bfloat16 a difference above WARN_ABOVE may be rounding, so it is only a warning.
LIMIT = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 1.0}
WARN_ABOVE = 0.1


class PolicyModel(FsdpRoot):
    """Causal language model with a forward pass that returns log-probs. Its parameter names begin with `model.`.
    excluded_ids: ids that are never sampled (find_excluded_ids); None: the placeholders of images."""

    excluded: Tensor  # int64: ids below num_tokens that are never sampled
    example_image: ImageInput | None = None  # of a vision-language model, for check_forward_vs_hf
    forward_methods = ("compute_lm_head_input", "compute_logprobs_with_hf_attention", "next_logits")

    def __init__(self, model: PreTrainedModel, excluded_ids: Sequence[int] | None = None):
        super().__init__()
        self.layers = find_decoder_layers(model)
        self.model = model
        self.scale, self.softcap = read_logit_scale_and_softcap(model.config)
        self.routers = RouterHooks.wrap_routers(model)  # of a mixture of experts
        self.placeholder_ids = find_placeholder_ids(model.config)
        self.excluded_ids = self.placeholder_ids if excluded_ids is None else tuple(excluded_ids)
        unused_ids = {*self.excluded_ids} - {*self.placeholder_ids}  # unlike placeholders, they never occur in text
        self.num_tokens = model.get_output_embeddings().weight.shape[0]
        while self.num_tokens - 1 in unused_ids:
            self.num_tokens -= 1
        excluded = [index for index in self.excluded_ids if index < self.num_tokens]
        device = model.get_output_embeddings().weight.device
        self.register_buffer("excluded", torch.tensor(excluded, device=device, dtype=torch.int64), persistent=False)
        model.get_output_embeddings().compute = self._compute_token_stats

    @property
    def untied_head(self) -> nn.Module | None:
        """The output head, if it is trained and not tied to the embedding."""
        head: nn.Module = self.model.get_output_embeddings()
        is_tied = head.weight is self.model.get_input_embeddings().weight
        return head if head.weight.requires_grad and not is_tied else None

    def forward(
        self,
        micro: MicroBatch,
        temperature: float,
        needs_entropy: bool = False,
        divergence_target: DivergenceTarget | None = None,
    ) -> TokenStats:
        """Compute log-probs [n] of the response tokens, and optionally entropy and divergence (compute_token_stats)."""
        states = self._compute_predicting_states(micro)
        head: Any = self.model.get_output_embeddings()
        stats: TokenStats = head.compute(
            states, micro.targets, temperature, needs_entropy, divergence_target, kept=micro.kept
        )
        if micro.sequence is None:
            return stats
        computed = {name: column for name, column in stats._asdict().items() if column is not None}
        gathered = gather_token_values(torch.stack(list(computed.values())), micro.predicting_tokens, micro.sequence)
        # Clones instead of views, because FSDP hooks the output.
        return stats._replace(**{name: row.clone() for name, row in zip(computed, gathered, strict=True)})

    def make_logprobs_function(self, temperature: float) -> Callable[[MicroBatch], Tensor]:
        """Return a function that computes the log-probs [n] of a micro-batch's response tokens at `temperature`."""
        return lambda micro: self(micro, temperature).logprobs

    @contextmanager
    def disable_adapters(self) -> Iterator[None]:
        """Context manager in which the model computes without its LoRA adapters, and chooses experts itself."""
        with lora.disable_adapters(self):
            if self.routers is None:
                yield
                return
            self.routers.follows_engine = False
            try:
                yield
            finally:
                self.routers.follows_engine = True

    def compute_lm_head_input(self, micro: MicroBatch) -> LmHeadInput:
        """Compute the hidden states that predict this rank's response tokens, and return them with the output head."""
        if isinstance(self.untied_head, FSDPModule):
            self.untied_head.unshard()
        return LmHeadInput(self._compute_predicting_states(micro), self._make_head())

    def _make_head(self) -> LmHead:
        output = self.model.get_output_embeddings()
        excluded = self.excluded if len(self.excluded) else None
        return LmHead(output.weight, output.bias, self.scale, self.softcap, self.num_tokens, excluded)

    def _compute_token_stats(self, states: Tensor, *arguments: Any, kept: KeptLogits | None = None) -> TokenStats:
        compute = partial(compute_token_stats, LmHeadInput(states, self._make_head()), fused=states.is_cuda, kept=kept)
        return compute(*arguments)

    def _compute_predicting_states(self, micro: MicroBatch) -> Tensor:
        routing = self.routers and self.routers.start_recording(micro.is_real_token, micro.token_columns)
        states = compute_hidden_states(self.model.base_model, micro, micro.predicting_tokens)
        if routing:
            routing.is_recording = False
        return states

    def compute_logprobs_with_hf_attention(
        self, token_ids: Tensor, image_tensors: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Compute the log-probs of tokens 1 to T - 1 with transformers' own forward pass. image_tensors:
        ImageInput.tensors of the prompt. [1, T] -> [T - 1]"""
        arguments: dict[str, Tensor] = {}
        if image_tensors:
            is_image = torch.isin(token_ids, torch.tensor(self.placeholder_ids, device=token_ids.device)).int()
            arguments = make_image_arguments(self.model.forward, {**image_tensors, "mm_token_type_ids": is_image})
        language = find_language_model(self.model)
        attention = language.config._attn_implementation
        language.set_attn_implementation("eager")
        if self.routers is not None:
            self.routers.current = None
        logits = self.model(input_ids=token_ids, use_cache=False, **arguments).logits[0, :-1].float()
        language.set_attn_implementation(attention)
        logits[:, list(self.excluded_ids)] = EXCLUDED_LOGIT
        return logits.log_softmax(dim=-1).gather(1, token_ids[0, 1:, None])[:, 0]

    def next_logits(self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Compute the logits of the next tokens (algorithms.sampling.next_logits). Requires generation_mode."""
        if self.routers is not None:
            self.routers.current = None
        logits, cache = sampling.next_logits(self.model, tokens, mask, positions, cache)
        logits[:, list(self.excluded_ids)] = EXCLUDED_LOGIT
        return logits, cache

    @contextmanager
    def generation_mode(self) -> Iterator[None]:
        """Context manager for generation with a KV cache: with transformers' attention and without compilation, because
        each shape occurs once."""
        language = find_language_model(self.model)
        attention = language.config._attn_implementation
        if uses_alphaapollo_backend(self.model):
            # SDPA is faster, but does not cap scores.
            softcap = getattr(self.model.config.get_text_config(), "attn_logit_softcapping", None)
            language.set_attn_implementation("sdpa" if self.model._supports_sdpa and not softcap else "eager")
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            language.set_attn_implementation(attention)


def load_policy(
    model: Model, mesh: ModelMesh, dtype: torch.dtype, offload_policy: bool, adapter_seed: int | None = None
) -> PolicyModel:
    """Load and shard a policy (a collective). `adapter_seed`: seed of LoRA adapters; None: the policy is frozen."""
    attention = get_attention_kernel(model)
    excluded_ids = find_excluded_ids(model.path, model.tokenizer_path, model.trust_remote_code)

    def load(parameter_dtype: torch.dtype | None) -> PolicyModel:
        if adapter_seed is None:
            return PolicyModel(load_causal_lm(model, attention, parameter_dtype), excluded_ids).requires_grad_(False)
        return PolicyModel(load_trainable_lm(model, attention, parameter_dtype, adapter_seed), excluded_ids)

    policy = shard_model(load(dtype), lambda: load(None), mesh, dtype, offload_policy)
    if policy.routers and adapter_seed is None:  # the engine's experts are those of the trained policy
        policy.routers.follows_engine = False
    policy.example_image = load_example_image(model) if find_vision_modules(policy.model) else None
    return policy


def read_logit_scale_and_softcap(config: PretrainedConfig) -> tuple[float, float | None]:
    """Read scale and softcap, which the model applies to its logits (see lm_head.LmHead), from its configuration."""
    text = config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):  # Cohere; Falcon-H1; Muse
        scale *= getattr(text, name, None) or 1.0
    scale /= getattr(text, "logits_scaling", None) or 1.0  # Granite
    return scale, getattr(text, "final_logit_softcapping", None)  # Gemma


@torch.no_grad()
def check_forward_vs_hf(policy: PolicyModel, builder: MicroBatchBuilder, dtype: torch.dtype) -> float:
    """Compare the policy's log-probs of two short sequences, and of a third with an image if the model reads images,
    with those of transformers' forward pass (a collective). This detects unknown logit transforms, unsupported
    attention, ignored sliding windows, packed sequences that influence each other, and layers without sequence
    parallelism. Returns the mean |difference| in nats. Raises ValueError if it exceeds rounding, or is not finite."""
    text = policy.model.config.get_text_config()
    window = getattr(text, "sliding_window", None) or 0
    lengths = (9 + (window if window <= 1024 else 0), 6)  # longer windows would need too much memory
    sequences = [(np.arange(length) * 37 + 11) % text.vocab_size for length in lengths]
    sequences = [replace_placeholder_ids(sequence, policy.excluded_ids) for sequence in sequences]
    starts, images = [1, 1], list[tuple[ImageInput, ...]]([(), ()])
    if image := policy.example_image:  # the response starts after the placeholders, which have log-prob -1e9
        sequences.append(np.concatenate([sequences[0], image.token_ids, sequences[1]]))
        starts, images = [1, 1, len(sequences[2]) - 5], [(), (), (image,)]
    rows = make_rows(sequences, starts, images=images)
    indices = list(range(len(sequences)))
    logprobs = policy(builder.build(rows, indices), 1.0).logprobs
    separate = torch.cat([policy(builder.build(rows, [index]), 1.0).logprobs for index in indices])
    native = torch.cat([_compute_native_logprobs(policy, builder, rows, index) for index in indices])
    name = type(policy.model).__name__
    if not native.isfinite().all():
        raise ValueError(
            f"{name}: the model's log-probs are not finite, because its weights are damaged or too large for "
            f"{str(dtype).removeprefix('torch.')}. Use another copy of the model, or model.dtype=float32."
        )
    influence = float((logprobs - separate).abs().mean())
    if not influence <= min(LIMIT[dtype], WARN_ABOVE):
        raise ValueError(
            f"{name}: the log-probs of a sequence change by {influence:.2g} nats on average beside another sequence. "
            "Set model.attention=padded, or choose another model."
        )
    mismatch = float((logprobs - native).abs().mean())
    if not mismatch <= LIMIT[dtype]:
        raise ValueError(
            f"{name}: the trainer's log-probs differ from those of transformers by {mismatch:.2g} nats on average, "
            "because the head or attention is not supported. Set model.attention=padded, or choose another model."
        )
    return mismatch


def _compute_native_logprobs(policy: PolicyModel, builder: MicroBatchBuilder, rows: Rows, row: int) -> Tensor:
    """Compute the log-probs of the response of a row with at most one image, with transformers' own forward pass."""
    token_ids = rows.token_ids[rows.token_offsets[row] : rows.token_offsets[row + 1]].astype(np.int64)
    tokens = torch.from_numpy(token_ids)[None].to(builder.device)
    images = rows.images[row] if rows.images else ()
    tensors = {name: builder.to_device(array) for image in images for name, array in image.tensors.items()}
    return policy.compute_logprobs_with_hf_attention(tokens, tensors)[rows.response_starts[row] - 1 :]


def check_policy(policy: PolicyModel, builder: MicroBatchBuilder, dtype: torch.dtype) -> list[str]:
    """Run check_forward_vs_hf on a policy to be trained (a collective). Returns warnings."""
    mismatch = check_forward_vs_hf(policy, builder, dtype)
    if mismatch > WARN_ABOVE:
        return [
            f"in bfloat16 the trainer's log-probs differ from those of transformers by {mismatch:.2g} nats on "
            "average. This may be rounding. To find out, run one iteration with model.dtype=float32: a real error "
            "stops it."
        ]
    return []


class ValueModel(FsdpRoot):
    """Critic: decoder of a causal language model with a new value head, initialized with `seed`. The head is float32,
    because GAE sums differences of values, and bfloat16 has steps of 0.004 near 1."""

    def __init__(self, model: PreTrainedModel, seed: int):
        super().__init__()
        self.layers = find_decoder_layers(model)
        self.model = model.base_model
        parameter = next(self.model.parameters())
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1, device=parameter.device, dtype=dtype)
        self.float32_modules = (self.value_head,)
        if not parameter.is_meta:
            init_scalar_head(self.value_head, derive_seed(seed, "value_head"))
            self.value_head.bias.data.zero_()

    def forward(self, micro: MicroBatch) -> Tensor:
        """Compute the value before each of the n response tokens. float32 or float64 [n]"""
        states = compute_hidden_states(self.model, micro, micro.predicting_tokens)
        values: Tensor = self.value_head(states.to(torch.promote_types(states.dtype, torch.float32)))
        return gather_token_values(values.t(), micro.predicting_tokens, micro.sequence)[0].clone()  # no view, for FSDP


class ScoreModel(FsdpRoot):
    """Reward model: decoder and float32 score head of a classifier with one label (models.load.load_reward_model)."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.layers = find_decoder_layers(model)
        self.model, self.score = model.base_model, model.score
        self.float32_modules = (self.score,)

    def forward(self, micro: MicroBatch) -> Tensor:
        """Compute the score of each of the b sequences, at its last token. float32 [b]"""
        scores: Tensor = self.score(compute_hidden_states(self.model, micro, micro.last_tokens).float())
        return gather_token_values(scores.t(), micro.last_tokens, micro.sequence)[0].clone()  # no view, for FSDP
