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

from alphaapollo.plugins.verify.stages import verify_recording
from alphaapollo.runs.update_checks import Check
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
TRUNCATED = f"{ROLLOUT}.temperature=0.5 {ROLLOUT}.top_p=0.8 {ROLLOUT}.min_p=0.1 {ACTOR}.entropy_coeff=0.1 "
TRUNCATED += f"{ACTOR}.optim.lr=1e-4 data.train_batch_size=16 {ACTOR}.ppo_mini_batch_size=32"
SETTINGS = {  # two optimizer steps per iteration, or ONE_STEP, after which the weights are compared
    "grpo": f"{ROLLOUT}.temperature=0.8 {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.5 {ACTOR}.entropy_coeff=0.1 "
    f"{ACTOR}.clip_ratio_low=0.02 {ACTOR}.clip_ratio_high=0.8 algorithm.overlong_filter=True",
    "adamw": f"{ONE_STEP} {ACTOR}.optim.weight_decay=0.01 {ACTOR}.grad_clip=0.1 {ACTOR}.optim.betas=[0.8,0.95] "
    f"{ACTOR}.optim.warmup_style=cosine",
    "ppo": "algorithm.adv_estimator=gae algorithm.gamma=0.99 algorithm.lam=0.9 algorithm.use_kl_in_reward=True "
    "algorithm.kl_ctrl.kl_coef=0.1 algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.1 "
    "algorithm.kl_ctrl.horizon=20 algorithm.kl_penalty=k3 critic.optim.lr=1e-2 critic.cliprange_value=0.01",
    "turns": f"{TURNS} algorithm.adv_estimator=turn_group algorithm.gamma=0.9 {ACTOR}.entropy_coeff=0.1",
    "gspo": f"{TURNS} env.context=memory {ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.clip_ratio=0.05 "
    f"{CORRECTION}.method=tis {CORRECTION}.level=geometric {CORRECTION}.low=0.01 {CORRECTION}.high=0.02",
    "kl_cov": f"{ACTOR}.policy_loss.loss_mode=kl_cov {ACTOR}.policy_loss.kl_cov_ratio=0.2",
    "lora": f"{MODEL}.lora_rank=4 {MODEL}.lora_alpha=8 {ACTOR}.use_kl_loss=True",
    "muon": f"{ONE_STEP} {ACTOR}.optim.name=muon {ACTOR}.optim.lr=1e-3 trainer.seed=1",
    "ranks": f"{ONE_STEP} trainer.n_gpus_per_node=2 {ACTOR}.loss_agg_mode=seq-mean-token-mean {ACTOR}.grad_clip=0.1",
    "bfloat16": f"{MODEL}.dtype=bfloat16",
    "hf": f"{ROLLOUT}.name=hf {ROLLOUT}.temperature=0.5 {ONE_STEP} data.train_batch_size=16",
    "vllm": f"{ROLLOUT}.temperature=0.5 {ROLLOUT}.name=vllm {ROLLOUT}.kv_cache_gib=0.1 {MODEL}.lora_rank=4 "
    f"{MODEL}.lora_alpha=8",
    "truncated": f"{ROLLOUT}.name=hf {TRUNCATED}",
    "truncated_vllm": f"{ROLLOUT}.name=vllm {ROLLOUT}.kv_cache_gib=0.1 {TRUNCATED}",
}
FAULTS = Path(__file__).with_name("planted_faults.txt")
RUN = f"import runpy, {PACKAGE}; print({PACKAGE}.__file__); runpy.run_module({MAIN!r}, run_name='__main__')"


@dataclass(frozen=True)
class Fault:
    name: str
    settings: str
    quantity: str  # the first check that fails; "none"; or "error: PART" of the message that ends the run
    edits: tuple[tuple[str, str, str], ...]  # file, text, and text that replaces it


def read_faults() -> list[Fault]:
    faults = []
    for block in FAULTS.read_text().split("\n= ")[1:]:
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
        checks = verify_recording(recording)
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
                f"the run failed with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
            )
        return self.folder / PACKAGE / name / "recorded" / "step_000002"


def check_fault(copy: PackageCopy, fault: Fault) -> bool:
    """Plant a fault, print a row of the table, and return whether the expected check finds it."""
    found, error = None, ""
    try:
        found = copy.find_first_difference(fault)
    except (RuntimeError, ValueError) as failure:
        error = f"\n{failure}"
    quantity, expected = found.quantity if found else "none", fault.quantity.removeprefix("error: ")
    if error:
        quantity = fault.quantity if fault.quantity != expected and expected in error else "error"
    file, deviation = fault.edits[0][0] if fault.edits else "", f"{found.deviation:.1e}" if found else ""
    verdict = "ok" if quantity == fault.quantity else ("MISSED" if fault.edits else "FAILED") + error
    row = fault.name, file, fault.settings, fault.quantity, quantity, deviation, verdict
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
