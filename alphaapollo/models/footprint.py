"""What one training rank holds, by role, at each moment of an iteration: arithmetic on sizes, nothing is run.

    generate ----> publish              engine awake, the trainer at rest
       |              ^
    update: head -> layer -> root -> step     engine asleep where it shares the device

FSDP2 as models/sharding.py sets it up: float32 slices, one layer gathered at a time and the next fetched ahead, root
(embedding, head, norms) gathered from the forward to the end of the backward pass, gradients reduced in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from alphaapollo.models.activations import Activations, ModelSizes

FLOAT32 = 4
ADAM = 2 * FLOAT32  # two moments a parameter


@dataclass(frozen=True)
class Held:
    """Bytes by role."""

    weights: int = 0  # float32, of what is trained
    gradients: int = 0
    optimiser: int = 0
    frozen: int = 0  # reference, teacher, reward model
    gathered: int = 0  # whole layers on loan from the other ranks, and gradients on their way back
    activations: int = 0
    logits: int = 0  # a chunk of them with its gradients
    engine: int = 0  # the engine's weights and what it computes with
    kv_cache: int = 0
    buckets: int = 0  # weights on their way to the engine
    checkpoint: int = 0  # the copy that a checkpoint is written from
    runtime: int = 0  # of the process: libraries, CUDA context

    @property
    def total(self) -> int:
        return sum(self.by_role().values())

    def by_role(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __add__(self, other: Held) -> Held:
        return Held(**{role: size + getattr(other, role) for role, size in self.by_role().items()})

    def __mul__(self, count: int) -> Held:
        return Held(**{role: size * count for role, size in self.by_role().items()})


@dataclass(frozen=True)
class Trained:
    """A model in training on one rank."""

    sizes: ModelSizes
    activations: Activations
    shards: int  # ranks that hold one copy together
    dtype_bytes: int  # of forward and backward
    whole_gradients: bool = False  # float32, kept whole until the optimiser's step (no reduction a micro-batch)
    rest_weights: bool = False  # slices lie in host memory between its phases
    rest_optimizer: bool = False  # the optimiser's state lies in host memory from a phase's end to the next one's step
    one_step: bool = False  # an update has one optimiser step
    adapters: int = 0  # parameters that alone are trained, over a base in the dtype of the arithmetic (LoRA); 0: all
    offload_policy: bool = False  # slices and optimiser never leave host memory; layers come whole, one at a time

    @property
    def slices(self) -> int:
        """Trained parameters of this rank."""
        return -(-(self.adapters or self.sizes.parameters) // self.shards)

    @property
    def base(self) -> int:
        """Bytes of weights of this rank that are not trained."""
        return self.dtype_bytes * -(-self.sizes.parameters // self.shards) if self.adapters else 0

    def stepped(self) -> Held:
        """In its phase, after an optimiser step."""
        if self.offload_policy:
            return Held()
        return Held(weights=self.base + FLOAT32 * self.slices, optimiser=ADAM * self.slices)

    def resting(self) -> Held:
        """Between its phases."""
        held = self.stepped()
        return replace(
            held,
            weights=0 if self.rest_weights else held.weights,
            optimiser=0 if self.rest_optimizer else held.optimiser,
        )

    def on_host(self) -> int:
        """Bytes in host memory between its phases."""
        return self.base + (FLOAT32 + ADAM) * self.slices - self.resting().total

    def saved(self) -> int:
        """Bytes of what a checkpoint holds of it."""
        return (FLOAT32 + ADAM) * self.slices

    def updating(self) -> dict[str, Held]:
        """Moments of its update."""
        sizes, b, share = self.sizes, self.dtype_bytes, self.activations
        root, unit = sizes.root, sizes.unit
        step, reduction = self.stepped(), FLOAT32
        if not self.offload_policy:
            step += Held(gradients=FLOAT32 * self.slices)
        own = replace(step, optimiser=0) if self.rest_optimizer and self.one_step else step
        if self.adapters:
            gathered = Held(gathered=b * (root + 2 * unit))
            head = own + gathered + Held(activations=share.kept, logits=share.head)
            return {"head": head, "layer": own + gathered + Held(activations=share.kept + share.layer), "step": step}
        if self.whole_gradients:
            own, reduction = own + Held(gradients=FLOAT32 * sizes.parameters), 0
        return {
            "head": own + Held(gathered=b * root, activations=share.kept, logits=share.head),
            "layer": own
            + Held(
                # This layer, the one fetched ahead, and the float32 gradients of the last, which go when the next come.
                gathered=b * (root + 2 * unit) + reduction * unit,
                activations=share.kept + share.layer,
                logits=b * sizes.head,  # the head's gradient waits for the embedding's
            ),
            "root": own + Held(gathered=(2 * b + reduction) * root + reduction * root // self.shards),
            "step": step,
        }


@dataclass(frozen=True)
class Engine:
    """An engine's share of one GPU."""

    budget: int  # what it takes when awake; of a CPU's engine its KV cache alone is bounded
    weights: int
    working: int  # the largest forward pass of a step, with the logits that it samples from

    def awake(self) -> Held:
        return Held(engine=self.weights + self.working, kv_cache=max(0, self.budget - self.weights - self.working))

    def receiving(self) -> Held:
        """Weights awake, the KV cache not."""
        return Held(engine=self.weights)


def frozen_slices(sizes: ModelSizes, shards: int, dtype_bytes: int) -> int:
    """Bytes of a reference, teacher or reward model on this rank."""
    return dtype_bytes * -(-sizes.parameters // shards)


def transfer_buckets(sizes: ModelSizes, dtype_bytes: int, bucket: int) -> int:
    """Bytes on their way to an engine: a bucket of about `bucket` bytes and the same packed, and the next one, for
    which a layer is gathered."""
    full = min(dtype_bytes * sizes.parameters, bucket + dtype_bytes * sizes.head)
    return dtype_bytes * max(sizes.unit, sizes.root) + 3 * full
