"""Make an archive of small run folders of the current format: python -m tests.old_runs.make

Run it after a change of FORMAT (alphaapollo/runs/checkpoint_folder.py), and keep the archives of earlier formats: they
are read by tests/unit/runs/test_format.py and tests/loop/test_old_runs.py.
Paths in the runs are relative to the folder that contains `model`, `data` and `outputs`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

from alphaapollo.runs.checkpoint_folder import FORMAT
from examples.quickstart.make_task import make_data, make_model, make_tokenizer

ROOT, HERE = Path(__file__).resolve().parents[2], Path(__file__).parent
ARCHIVES = sorted(HERE.glob("format_*.tar.xz"))
REWARD = "def compute_score(prompt, completion):\n    return sum(letter.isdigit() for letter in completion) / 10\n"
SIZES = {  # of a model with 6,000 parameters
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "intermediate_size": 16,
}  # fmt: skip
SHARED = "trainer.project_name=old trainer.device=cpu"
REWARDED = "data.max_response_length=8 custom_reward_function.path=reward.py"
TRAINING = (
    f"{SHARED} trainer.controller=local trainer.cpu_threads=1 trainer.total_training_steps=2 trainer.save_freq=2 "
    "trainer.export_hf=False data.train_batch_size=2"
)
RUNS = {  # name of the run -> module and keys
    "rl": f"trainer.main_ppo {TRAINING} {REWARDED} data.max_prompt_length=32 data.train_files=data/train.parquet "
    "data.val_files=data/val.parquet actor_rollout_ref.model.path=model actor_rollout_ref.rollout.name=fake "
    "actor_rollout_ref.actor.ppo_mini_batch_size=4 algorithm.adv_estimator=grpo env.rollout.n=2 trainer.test_freq=2 "
    "trainer.record_steps=[2]",
    "sft": f"trainer.main_sft {TRAINING} data.train_files=data/sft.parquet model.path=model trainer.log_freq=1",
    "generation": f"trainer.main_generation {SHARED} trainer.controller=local {REWARDED} data.max_prompt_length=32 "
    "data.path=data/val.parquet data.n_samples=2 model.path=model rollout.name=fake",
    "evolution": f"evolving.main {SHARED} {REWARDED} data.max_prompt_length=400 data.path=data/val.parquet "
    "models={policy:{path:model}} rollout.name=fake evolving.rounds=1 evolving.votes=1",
}


@contextmanager
def unpack(archive: Path, folder: Path) -> Iterator[Path]:
    """Unpack an archive to the folder, which is the working directory meanwhile. Yields the folder of the runs."""
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    with chdir(folder):
        yield Path("outputs/old")


def make_runs(folder: Path) -> None:
    """Run the commands of RUNS in the folder."""
    make_tokenizer(folder / "model")
    make_model(folder / "model", seed=0, **SIZES)
    make_data(folder / "data", seed=0, num_sft=8, num_rl=8, num_val=2)
    (folder / "reward.py").write_text(REWARD)
    for name, words in RUNS.items():
        command = [sys.executable, "-m", *f"alphaapollo.{words} trainer.experiment_name={name}".split()]
        subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


def pack(folder: Path, archive: Path) -> None:
    """Pack the content of a folder, without owners and times of the files."""

    def clean(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name, filter=clean)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        make_runs(Path(scratch))
        pack(Path(scratch), HERE / f"format_{FORMAT}.tar.xz")


if __name__ == "__main__":
    main()
