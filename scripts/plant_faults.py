"""Plant faults in a copy of the project, and check that `alphaapollo verify` finds each one in the stage that has it.

    python -m scripts.plant_faults                             # all: ten minutes on two cores, without a GPU
    python -m scripts.plant_faults loss-sign gae-next-value    # some of them

Each fault is planted alone. A tiny run of the faulty copy records an iteration, and the verification of this project,
which has no fault, checks it: the expected check must be the first one that fails. Without a fault, all checks must
pass with the same settings. Exit code 1 if a fault is missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging

from alphaapollo.runs.update_checks import Check
from alphaapollo.verification.recording import read_complete_recording
from alphaapollo.verification.stages import Verification
from scripts.checks import ROOT
from scripts.small_run import make_task, run_words

PACKAGE, MAIN = "alphaapollo", "alphaapollo.trainer.main_ppo"
ROW = "{:31} {:34} {:8} {:26} {:26} {:9} {}"
REWARD = """
import zlib
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    number = zlib.crc32(solution_str.encode())
    if number % 11 == 0:
        raise RuntimeError("no reward")
    return (number % 4) / 3 if len(solution_str) > 4 else 1.0
"""
ENVIRONMENT = """
import zlib
from alphaapollo.environments.base import Observation, StepResult, register_environment
from alphaapollo.types import Score
@register_environment("numbers", tools=None)
class Numbers:
    def __init__(self, services):
        self.turns = 0
    def reset(self, prompt):
        self.length = 2 + prompt.id % 3
        return Observation([{"role": "user", "content": f"Count to {self.length}"}])
    def step(self, action):
        self.turns += 1
        number = zlib.crc32(action.encode())
        done = self.turns == self.length or number % 5 == 0
        more = None if done else Observation([{"role": "user", "content": "more" * (1 + number % 2)}])
        return StepResult(more, done, number % 3 / 2, score=Score(number % 2) if done else None)
    def close(self):
        pass
"""
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{section}" for section in ("actor", "rollout", "model"))
BASE = f"""
trainer.controller=local trainer.device=cpu trainer.cpu_threads=1 trainer.total_training_steps=2
trainer.record_steps=[2] trainer.save_freq=-1 trainer.export_hf=False trainer.test_freq=-1
trainer.val_before_train=False custom_reward_function.name=compute_score data.val_files=[] data.train_batch_size=4
data.max_prompt_length=128 data.max_response_length=14 env.rollout.n=4 algorithm.adv_estimator=grpo
{MODEL}.dtype=float32 {ROLLOUT}.name=fake {ACTOR}.ppo_mini_batch_size=8 {ACTOR}.ppo_max_token_len_per_gpu=256
{ACTOR}.optim.lr=1e-2 {ACTOR}.optim.weight_decay=0.1
"""
ONE_STEP = f"{ACTOR}.ppo_mini_batch_size=16"
TURNS = "env.env_name=numbers env.custom_module=ENVIRONMENT env.max_steps=4 data.max_response_length=64"
CORRECTION = "algorithm.rollout_correction"
SETTINGS = {  # two optimizer steps per iteration, or ONE_STEP, after which the weights are compared
    "grpo": f"{ROLLOUT}.temperature=0.8 {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.5 {ACTOR}.entropy_coeff=0.1 "
    f"{ACTOR}.clip_ratio_low=0.05 {ACTOR}.clip_ratio_high=0.4 algorithm.overlong_filter=True",
    "adamw": f"{ONE_STEP} {ACTOR}.grad_clip=0.1 {ACTOR}.optim.betas=[0.8,0.95] {ACTOR}.optim.warmup_style=cosine",
    "ppo": "algorithm.adv_estimator=gae algorithm.gamma=0.99 algorithm.lam=0.9 algorithm.use_kl_in_reward=True "
    "algorithm.kl_ctrl.kl_coef=0.1 algorithm.kl_penalty=k3 critic.optim.lr=1e-2 critic.cliprange_value=0.01",
    "turns": f"{TURNS} algorithm.adv_estimator=turn_group algorithm.gamma=0.9 {ACTOR}.entropy_coeff=0.1",
    "gspo": f"{TURNS} env.context=memory {ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.clip_ratio=0.05 "
    f"{CORRECTION}.method=tis {CORRECTION}.level=geometric {CORRECTION}.low=0.007 {CORRECTION}.high=0.013",
    "lora": f"{MODEL}.lora_rank=4 {MODEL}.lora_alpha=8 {ACTOR}.use_kl_loss=True",
    "muon": f"{ONE_STEP} {ACTOR}.optim.name=muon {ACTOR}.optim.lr=1e-3 trainer.seed=1",
    "ranks": f"{ONE_STEP} trainer.n_gpus_per_node=2 {ACTOR}.loss_agg_mode=seq-mean-token-mean {ACTOR}.grad_clip=0.1",
    "bfloat16": f"{MODEL}.dtype=bfloat16",
    "vllm": f"{ROLLOUT}.name=vllm {ROLLOUT}.kv_cache_gib=0.1 {MODEL}.lora_rank=4 {MODEL}.lora_alpha=8",
}
# name | settings | check that fails | file, and the text in it before and after
FAULTS = r"""
= loss-sign | grpo | gradient of step 1 | algorithms/policy_losses/ppo.py
loss = -torch.minimum(ratio --> loss = torch.minimum(ratio
= entropy-sign | grpo | gradient of step 1 | workers/policy_objective.py
loss - actor.entropy_coeff --> loss + actor.entropy_coeff
= kl-loss-estimator | grpo | gradient of step 1 | algorithms/kl.py
"low_var_kl": "k3" --> "low_var_kl": "k1"
= token-mean-over-rows | grpo | gradient of step 1 | algorithms/aggregation.py
(1.0 / n.sum().clamp(min=1)).expand_as(n) --> torch.full_like(n, 1.0 / num_rows)
= overlong-filter-ignored | grpo | gradient of step 1 | trainer/step/selection.py
config.algorithm.overlong_filter and trajectory.truncated --> False
= gradients-not-cleared | grpo | gradient of step 1 | models/train_state.py
self.module.zero_grad(set_to_none=True)
        self.num_steps += 1 --> self.num_steps += 1
= clip-bounds-swapped | grpo | gradient of step 2 | algorithms/policy_losses/base.py
return default_low if low is None else low, default_high if --> high, low = low, high
    return default_low if low is None else low, default_high if
= clip-missing | grpo | gradient of step 2 | algorithms/policy_losses/ppo.py
ratio.clamp(1.0 - low, 1.0 + high) * advantages) --> ratio * advantages)
= old-logprobs-recomputed | grpo | gradient of step 2 | workers/policy.py
old_logprobs=None if recorded is not None else old) --> old_logprobs=None)
= grpo-ddof | grpo | advantages | algorithms/advantages/grpo.py
spread = groups.std(scores, ddof) + eps --> spread = groups.std(scores, 0) + eps
= grpo-epsilon | grpo | advantages | algorithms/advantages/grpo.py
spread = groups.std(scores, ddof) + eps --> spread = groups.std(scores, ddof) + 1e-4
= advantages-of-other-rows | grpo | advantages | batching/batch.py
column[start:end] = values[first : first + end - start] --> column[start:end] = values[start:end]
= failed-grade-is-zero | grpo | mini-batches | trainer/step/selection.py
for trajectory in group.trajectories if is_trainable(trajectory)] -->
            if is_trainable(trajectory)
            else replace(trajectory, score=replace(trajectory.score, reward=0.0))
            for trajectory in group.trajectories
        ]
= temperature | grpo | old log-probs | workers/policy.py
setup.temperature, setup.correction --> 1.0, setup.correction
= log-probs-of-next-token | grpo | old log-probs | workers/model_worker.py
values[done : done + end - start] --> np.roll(values[done : done + end - start], -1)
= computes-in-bfloat16 | grpo | old log-probs | workers/model_worker.py
self.dtype: torch.dtype = getattr(torch, model.dtype) --> self.dtype = torch.bfloat16
= reference-is-policy | grpo | reference log-probs | trainer/step/learn.py
policy.compute_log_probs("reference") --> policy.compute_log_probs()
= rows-dropped | adamw | old log-probs | batching/packing.py
mask, steps = keep[order], rank.mini_batches --> mask, steps = keep, rank.mini_batches
= decay-missing | adamw | weights | models/train_state.py
weight_decay if group["params"][0] in decayed else 0.0 --> 0.0
= decay-of-norms | adamw | weights | models/train_state.py
weight_decay if group["params"][0] in decayed else 0.0 --> weight_decay
= betas-default | adamw | weights | models/train_state.py
adam.betas or config.betas --> (0.9, 0.999)
= adam-epsilon | adamw | weights | models/train_state.py
optimizer.defaults["eps"] if adam.eps is None --> 1e-6 if adam.eps is None
= bias-correction-missing | adamw | weights | models/train_state.py
optimizer.step() --> [state["step"].fill_(10**6) for state in optimizer.state.values()]; optimizer.step()
= learning-rate-step | adamw | weights | models/train_state.py
compute_learning_rate(self.num_steps, --> compute_learning_rate(self.num_steps + 1,
= gradient-clip-missing | adamw | weights | models/train_state.py
if max_norm < norm < math.inf: --> if False:
= kl-reward-sign | ppo | advantages | algorithms/kl.py
token_rewards - coef * kl --> token_rewards + coef * kl
= gae-next-value | ppo | advantages | algorithms/advantages/gae.py
gamma * next_action_value(values, mask) - values --> gamma * values - values
= whitening-missing | ppo | advantages | trainer/step/credit.py
if estimator.whitens(algorithm): --> if False:
= returns-without-values | ppo | returns | algorithms/advantages/gae.py
Advantages(advantages, advantages + values) --> Advantages(advantages, advantages)
= old-log-probs-of-initial-policy | ppo | old log-probs | trainer/step/learn.py
await policy.compute_log_probs() if run.plan --> await policy.compute_log_probs("reference") if run.plan
= values-of-next-token | ppo | values | models/policy.py
micro.predicting_tokens, micro.sequence)[0].clone() --> micro.predicting_tokens, micro.sequence)[0].roll(-1)
= value-clip-missing | ppo | critic: gradient of step 2 | algorithms/value_loss.py
0.5 * torch.maximum(unclipped, clipped) --> 0.5 * unclipped
= outcome-on-first-turn | turns | advantages | trainer/step/shaped_rewards.py
rewards[trained[-1].end - 1] += outcome --> rewards[trained[0].end - 1] += outcome
= reward-on-turn-before | turns | advantages | trainer/step/shaped_rewards.py
for turn, _, end in trained: --> for turn, end, _ in trained:
= turn-end | turns | advantages | trainer/step/turns.py
end = first_token + last + 1 --> end = first_token + last
= observations-trained | turns | gradient of step 1 | models/micro_batch.py
chosen.action_mask.astype(np.float32) --> np.ones_like(chosen.action_mask, dtype=np.float32)
= micro-batch-mean | turns | gradient of step 1 | workers/model_worker.py
(loss * self.placement.world_size) --> (loss / len(mini_batch.micro_batches))
= gspo-ratio-sum | gspo | gradient of step 1 | algorithms/policy_losses/gspo.py
row_mean(logp - old_logp, mask) --> apply_mask(logp - old_logp, mask).sum(dim=1)
= gspo-ratio-of-rows | gspo | gradient of step 1 | workers/policy_objective.py
if columns.trajectory_ids is not None: --> if False:
= correction-lower-bound | gspo | gradient of step 1 | algorithms/mismatch.py
weights = rho.clamp(low, high) if --> weights = rho.clamp(max=high) if
= lora-scale | lora | old log-probs | models/lora.py
lora_alpha=lora.alpha --> lora_alpha=lora.lora_rank
= muon-scale | muon | weights | models/train_state.py
"match_rms_adamw" --> "original"
= ranks-summed | ranks | gradient of step 1 | workers/model_worker.py
loss * self.placement.world_size --> loss * self.placement.world_size**2
= weights-of-other-rows | ranks | gradient of step 1 | batching/batch.py
[values[order] for order in self.row_order] --> [values[: len(order)] for order in self.row_order]
= norm-of-own-shard | ranks | weights | models/train_state.py
sum_over_shards(square, slices[0]).item() --> square.item()
= weights-in-bfloat16 | bfloat16 | weights | models/lora.py
model.lora_rank else torch.promote_types(dtype, torch.float32) --> model.lora_rank else dtype
= published-weights-stale | vllm | published weights | workers/policy.py
return self.sender.send(gather_parameters(model, self.dtype), version) -->
        stale, self.sent = getattr(self, "sent", None), [(n, t * 1) for n, t in gather_parameters(model, self.dtype)]
        return self.sender.send(stale or self.sent, version)
@ weight_sync/verification.py
if not worst <= tolerance: --> if False:
= published-without-adapters | vllm | published weights | models/export.py
lora.merge_lora_weight(adapted[name]) if name in adapted else parameters --> parameters
@ weight_sync/verification.py
if not worst <= tolerance: --> if False:
"""
RUN = f"import runpy, {PACKAGE}; print({PACKAGE}.__file__); runpy.run_module({MAIN!r}, run_name='__main__')"


@dataclass(frozen=True)
class Fault:
    name: str
    settings: str
    quantity: str  # the first check that fails, or "none"
    edits: tuple[tuple[str, str, str], ...]  # file, text, and text that replaces it


def read_faults() -> list[Fault]:
    faults = []
    for block in FAULTS.split("\n= ")[1:]:
        *head, text = block.split(" | ", 3)
        parts = [part.split("\n", 1) for part in text.split("\n@ ")]
        edits = [(file, *map(str.strip, edit.split(" -->"))) for file, edit in parts]
        faults.append(Fault(*head, tuple(edits)))
    return faults


def replace_once(file: str, text: str, old: str, new: str) -> str:
    """Replace a part of the text of a file. Raises ValueError unless the text has it once."""
    if (count := text.count(old)) != 1:
        raise ValueError(f"{file} must have this text once, but has it {count} times: {old}")
    return text.replace(old, new)


class PackageCopy:
    """Copy of the package with a tiny task, whose runs are verified."""

    def __init__(self, folder: Path):
        self.folder, self.package = folder, folder / "copy" / PACKAGE
        shutil.copytree(ROOT / PACKAGE, self.package, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "copy" / "configs").symlink_to(ROOT / "configs")
        make_task(folder / "task", REWARD)
        (folder / "environment.py").write_text(ENVIRONMENT)

    def find_first_difference(self, fault: Fault) -> Check | None:
        """Plant a fault, and return the first check that fails. Raises RuntimeError if the run fails, and ValueError
        if the fault cannot be planted, or the recording cannot be verified."""
        texts = {file: (self.package / file).read_text() for file, _, _ in fault.edits}
        for file, old, new in fault.edits:
            (self.package / file).write_text(replace_once(file, texts[file], old, new))
        try:
            recording = self.record(f"{fault.settings}-{fault.name}", fault.settings)
        finally:
            for file, text in texts.items():
                (self.package / file).write_text(text)
        checks = Verification(read_complete_recording(recording)).run()
        return next((check for check in checks if not check.passed), None)

    def record(self, name: str, settings: str) -> Path:
        """Run the copy, and return its recording. Raises RuntimeError if the run fails."""
        words = f"{BASE} {SETTINGS[settings]}".replace("ENVIRONMENT", str(self.folder / "environment.py")).split()
        chosen = dict(word.split("=", 1) for word in [*run_words(self.folder / "task", self.folder, name), *words])
        command = [sys.executable, "-c", RUN, *(f"{key}={value}" for key, value in chosen.items())]
        environment, cwd = os.environ | {"PYTHONPATH": str(self.package.parent)}, self.package.parent
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode or str(self.package / "__init__.py") not in done.stdout.splitlines():
            raise RuntimeError(
                f"the run failed with exit code {done.returncode}:\n{done.stdout}\n{done.stderr[-2000:]}"
            )
        return self.folder / PACKAGE / name / "recorded" / "step_000002"


def check_fault(copy: PackageCopy, fault: Fault) -> bool:
    """Plant a fault, print a row of the table, and return whether the expected check finds it."""
    found, error = None, ""
    try:
        found = copy.find_first_difference(fault)
    except (RuntimeError, ValueError) as failure:
        error = f"\n{failure}"
    quantity = "error" if error else found.quantity if found else "none"
    file, deviation = fault.edits[0][0] if fault.edits else "", f"{found.deviation:.1e}" if found else ""
    verdict = "ok" if quantity == fault.quantity else "MISSED" if fault.edits else "FAILED"
    row = fault.name, file, fault.settings, fault.quantity, quantity, deviation, verdict + error
    print(ROW.format(*row), flush=True)
    return quantity == fault.quantity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant (default: all)")
    names = parser.parse_args().names
    faults = [fault for fault in read_faults() if not names or fault.name in names]
    if unknown := {*names} - {fault.name for fault in faults}:
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}")
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="torch")
    print(ROW.format("fault", "file", "settings", "expected", "found", "deviation", "verdict"))
    with tempfile.TemporaryDirectory() as folder:
        copy = PackageCopy(Path(folder))
        unchanged = [Fault("no-fault", name, "none", ()) for name in sorted({fault.settings for fault in faults})]
        runs = sorted([*unchanged, *faults], key=lambda fault: fault.settings)  # one setting after the other
        results = [check_fault(copy, fault) for fault in runs]
    print(f"{sum(results)} of {len(results)} rows as expected")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
