"""Compare gradients of the losses of main_dpo and main_rm with TRL's trainers (DPO, KTO, ORPO, CPO, reward).

    .venv/bin/python scripts/bench/preference_gradients.py

The inputs are a random Qwen3, a reference and eight pairs of texts, in float32; our side is packed, with shared prompts
and small micro-batches. TRL runs in a virtual environment under outputs/bench, created by the first run (see step.py).
Prints one line per loss: the two losses, and the largest difference of a gradient over the largest gradient. The last
line is a JSON object; the exit status is 1 if losses that should agree differ. Known differences
(docs/algorithms/preference.md): TRL omits label smoothing of `sigmoid` (D14), its `ipo` averages over tokens (ours:
ipo_mean, D13), and its ORPO has another next-token loss, so the odds-ratio term is compared: the difference between
lambda 1.1 and 0.1. KTO gets the unrelated responses that TRL uses, those of the previous row.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "outputs" / "bench"
sys.path.insert(0, str(ROOT))

from alphaapollo.types import Row  # noqa: E402
from scripts.bench._task import Size, make_model  # noqa: E402
from scripts.bench._trl import environment, trl_python  # noqa: E402

ALIKE = 1e-3
SIZE = Size(vocab_size=272, hidden_size=128, num_layers=2, head_dim=32)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # ours and TRL's keys
    "sigmoid": ({"loss": "sigmoid", "beta": 0.3}, {"loss_type": "sigmoid", "beta": 0.3}),
    "hinge": ({"loss": "hinge"}, {"loss_type": "hinge", "beta": 0.1}),
    "ipo_mean": ({"loss": "ipo_mean"}, {"loss_type": "ipo", "beta": 0.1}),
    "robust": (
        {"loss": "robust", "label_smoothing": 0.1},
        {"loss_type": "robust", "beta": 0.1, "label_smoothing": 0.1},
    ),
    "exo_pair": (
        {"loss": "exo_pair", "label_smoothing": 1e-3},
        {"loss_type": "exo_pair", "beta": 0.1, "label_smoothing": 1e-3},
    ),
    "nca_pair": ({"loss": "nca_pair"}, {"loss_type": "nca_pair", "beta": 0.1}),
    "sppo_hard": ({"loss": "sppo_hard", "beta": 0.1}, {"loss_type": "sppo_hard", "beta": 0.1}),
    "apo_zero": ({"loss": "apo_zero"}, {"loss_type": "apo_zero", "beta": 0.1}),
    "apo_down": ({"loss": "apo_down"}, {"loss_type": "apo_down", "beta": 0.1}),
    "simpo": (
        {"loss": "simpo", "beta": 2.0, "simpo_gamma": 1.0},
        {"trainer": "cpo", "loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    ),
    "orpo_0.1": ({"loss": "orpo", "beta": 0.1}, {"trainer": "orpo", "beta": 0.1}),
    "orpo_1.1": ({"loss": "orpo", "beta": 1.1}, {"trainer": "orpo", "beta": 1.1}),
    "kto": (
        {"loss": "kto", "kto_undesirable_weight": 1.2},
        {"trainer": "kto", "loss_type": "kto", "beta": 0.1, "undesirable_weight": 1.2},
    ),
}
OTHERWISE = ("orpo_0.1", "orpo_1.1")  # only their difference is compared

CENTRING = {"bradley_terry": 0.0, "bradley_terry_centred": 0.05}
THEIRS: dict[str, dict[str, Any]] = {
    **{name: theirs for name, (_, theirs) in CASES.items()},
    **{name: {"center_rewards_coefficient": value} for name, value in CENTRING.items()},
}


def make_inputs() -> dict[str, str]:
    """Write a reference, a policy, a reward model and pairs, and return their paths."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    reference, policy, scorer = (FOLDER / f"preference_{name}" for name in ("reference", "policy", "scorer"))
    pairs, singles = FOLDER / "pairs.jsonl", FOLDER / "singles.jsonl"
    make_model(reference, SIZE)
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(policy)
    tokenizer = AutoTokenizer.from_pretrained(reference)
    tokenizer.save_pretrained(policy)
    classifier = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
    classifier.score.weight.data.normal_(generator=generator)
    classifier.config.pad_token_id = tokenizer.pad_token_id
    classifier.save_pretrained(scorer)
    tokenizer.save_pretrained(scorer)
    rng = random.Random(0)

    def text(low: int, high: int) -> str:
        return "".join(rng.choice("abcdefgh 0123456789") for _ in range(rng.randint(low, high))).strip() + "."

    rows = [{"prompt": text(5, 30), "chosen": text(3, 40), "rejected": text(3, 40)} for _ in range(8)]
    pairs.write_text("\n".join(json.dumps(row) for row in rows))
    sides = ["chosen", "rejected"] * 4
    labelled = [
        {"prompt": row["prompt"], "response": row[side], "label": side == "chosen"}
        for row, side in zip(rows, sides, strict=True)
    ]
    singles.write_text("\n".join(json.dumps(row) for row in labelled))
    paths = {"policy": policy, "reference": reference, "scorer": scorer, "pairs": pairs, "singles": singles}
    return {name: str(path) for name, path in paths.items()}


def ours(inputs: dict[str, str]) -> dict[str, dict[str, np.ndarray]]:
    """Gradients and loss of each case, computed by the workers of main_dpo and main_rm."""
    from alphaapollo.batching.packing import (
        collect_row_values,
        distribute_preference_examples,
        distribute_rows_for_reference,
    )
    from alphaapollo.config.resolve import resolve_model
    from alphaapollo.config.schema import DpoConfig, RmConfig
    from alphaapollo.data.preference_examples import load_preferences
    from alphaapollo.data.rendering import Renderer
    from alphaapollo.data.vocabulary import load_tokenizer
    from alphaapollo.finetuning.dpo import assign_reference_logps
    from alphaapollo.workers.preference import PreferenceWorker, RewardTrainingWorker
    from alphaapollo.workers.process_group import NO_RENDEZVOUS, RankPlacement

    def worker(path: str, keys: dict[str, Any]) -> PreferenceWorker:
        config = DpoConfig(model={"path": path, "attention": "sdpa"}, preference=keys)
        placement = RankPlacement(0, 1, NO_RENDEZVOUS, "cpu", 1)
        return PreferenceWorker(config, resolve_model(config.model, "cpu"), placement, 1)

    renderer = Renderer(load_tokenizer(inputs["policy"]))
    singles = DpoConfig(data={"shuffle": False}).data
    examples = load_preferences(inputs["pairs"], renderer, DpoConfig().data).examples
    answers = load_preferences(inputs["singles"], renderer, singles, single_answers=True).examples
    for answer, before in zip(answers, [answers[-1], *answers[:-1]], strict=True):
        answer.unrelated_answer = joined(answer.rows[0], before.rows[0])
    for some, keys in ((examples, {}), (answers, {"loss": "kto"})):
        reference = worker(inputs["reference"], keys)
        layout = distribute_rows_for_reference(some, 1, 200, False, True)
        assign_reference_logps(
            some, collect_row_values(layout, [reference.compute_ref_log_probs(layout.rank_batches[0])])
        )
        reference.close()
    (batch,) = distribute_preference_examples(examples, 1, 200, False, True)
    (single,) = distribute_preference_examples(answers, 1, 200, False, True)
    found = {}
    for name, (keys, _) in CASES.items():
        policy = worker(inputs["policy"], keys)
        found[name] = gradients(policy, policy.model.model, single if name == "kto" else batch)
    for pair in examples:
        pair.rows = [scored(row) for row in pair.rows]
    (batch,) = distribute_preference_examples(examples, 1, 200, False, True)
    for name, centring in CENTRING.items():
        config = RmConfig(
            model={"path": inputs["scorer"], "attention": "sdpa"}, bradley_terry={"centring_coef": centring}
        )
        placement = RankPlacement(0, 1, NO_RENDEZVOUS, "cpu", 1)
        trained = RewardTrainingWorker(config, resolve_model(config.model, "cpu"), placement, 1)
        found[name] = gradients(trained, trained.hf_model, batch)
    return found


def joined(prompt: Row, answer: Row) -> Row:
    """Join the prompt of one row with the response of another."""
    start, other = prompt.response_start, answer.response_start
    ids = [*prompt.token_ids[:start], *answer.token_ids[other:]]
    return Row(ids, [*[0] * start, *answer.action_mask[other:]], [0.0] * len(ids), [len(ids) - 1])


def scored(row: Row) -> Row:
    """Row with its last token as the response. No line break follows, as in TRL."""
    return replace(row, action_mask=[0] * (len(row.token_ids) - 1) + [1])


def gradients(worker: Any, model: Any, batch: Any) -> dict[str, np.ndarray]:
    """Gradients of one batch by the parameter names of `model`, and the loss. Closes the worker."""
    from alphaapollo.models.sharding import full_tensor

    counts, total = worker._counted(batch), 0.0
    assert counts.get("kl", 1.0) > 0.0, "KTO's KL is clipped to 0, so it is not compared"
    for positions in worker.state.iterate_micro_batches(batch.mini_batches[0].micro_batches):
        loss, _ = worker.compute_loss(batch, positions, counts)
        loss.backward()
        total += loss.item()
    found = {name: full_tensor(p.grad).numpy() for name, p in model.named_parameters() if p.grad is not None}
    worker.close()
    return found | {"loss": np.array(total)}


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    inputs = make_inputs()
    given = inputs | {"cases": THEIRS, "out": str(FOLDER)}
    side = [str(trl_python(FOLDER / "trl-venv")), str(ROOT / "scripts/bench/_trl_gradients.py"), json.dumps(given)]
    subprocess.run(side, env=environment(1), check=True, stdout=sys.stderr)
    gaps, here, there = {}, ours(inputs), {}
    for name in here:
        with np.load(FOLDER / f"{name}.npz") as file:
            there[name] = dict(file)
    for side in (here, there):
        low, high = (side[name] for name in OTHERWISE)
        side["odds_ratio"] = {key: high[key] - low[key] for key in high}
    for name, own in here.items():
        theirs = there[name]
        loss, their_loss = float(own.pop("loss")), float(theirs.pop("loss"))
        assert own.keys() == theirs.keys(), own.keys() ^ theirs.keys()
        largest = max(np.abs(gradient).max() for gradient in theirs.values())
        gaps[name] = float(max(np.abs(own[key] - theirs[key]).max() for key in own) / largest)
        print(f"{name:21} loss {loss:.6f} here, {their_loss:.6f} with TRL; gradients differ by {gaps[name]:.1e}")
    print(json.dumps({"gaps": gaps}))
    return int(max(gap for name, gap in gaps.items() if name not in OTHERWISE) > ALIKE)


if __name__ == "__main__":
    sys.exit(main())
