"""Two GRPO iterations on prompts with images on Ray with vLLM, of a tiny model of each family, with a trained vision
tower: engine and trainer agree on the sampled tokens and on the probe, which have images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from scripts.gpu_check.kit import Kit, need
from scripts.gpu_check.runs import train
from tests.vision.models import FAMILIES, make

NUM_PROMPTS = 16
LIMIT = {"cuda": 0.1, "cpu": 1e-5}  # mean |difference| of log-probs, in nats
CHECKED = ("mismatch/abs", "sync/probe_gap")


def run(kit: Kit) -> None:
    need("vllm", "ray", "PIL")
    data = write_prompts(kit.folder / "images")
    for family in FAMILIES:
        with kit.part(family):
            model = kit.folder / "models" / family
            make(family, model)
            words = [f"actor_rollout_ref.model.path={model}", f"data.train_files={data}", "data.max_prompt_length=128"]
            words += ["actor_rollout_ref.model.freeze_vision=false", "trainer.total_training_steps=2"]
            metrics = train(kit, family, *words)
            assert len(metrics) == 2 and all(line["actor/grad_norm"] > 0 for line in metrics)
            for name in CHECKED:
                worst = max(line[name] for line in metrics)
                kit.record(f"{family} {name}", worst)
                assert worst < LIMIT[kit.device], f"{name} is {worst:.2g}"
            kit.record(f"{family} step_seconds", metrics[-1]["timing/step"])


def write_prompts(folder: Path) -> Path:
    """Write prompts with none to two images of random sizes. Returns the data file."""
    from PIL import Image

    folder.mkdir(parents=True)
    rng, rows = np.random.default_rng(0), []
    for index in range(NUM_PROMPTS):
        names = [f"{index}_{number}.png" for number in range(index % 3)]
        for name in names:
            height, width = rng.integers(16, 80, 2)
            Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / name)
        content = "<image>" * len(names) + "How many?"
        rows.append({"data_source": "images", "prompt": [{"role": "user", "content": content}], "images": names})
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
