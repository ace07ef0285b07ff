"""Complete iterations on Ray with vLLM on the training GPU, of the sizes in docs/benchmark_details.md and
docs/recipes.md. Weights are random, so that almost every response has the maximum length."""

from __future__ import annotations

from scripts.checks import ROOT
from scripts.gpu_check.kit import Kit, need
from scripts.gpu_check.runs import train

MODELS = {"0.5b": "Qwen/Qwen2.5-0.5B", "gsm8k": ""}  # of each part; "": that of the recipe
WORDS = {
    "0.5b": [
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=128",
        "data.max_prompt_length=64",
        "data.max_response_length=1736",
        "env.rollout.n=8",
    ],
    "gsm8k": ["--config-dir", str(ROOT / "examples" / "recipes" / "gsm8k"), "--config-name", "one_gpu"],
}
SMALL = [  # on a CPU
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=32",
    "env.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.max_num_seqs=8",
    "actor_rollout_ref.rollout.kv_cache_gib=0.1",
]
FEW = [
    "data.val_files=",
    "trainer.project_name=alphaapollo",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.export_hf=false",
    "trainer.total_training_steps=3",
]
MEASURED = {  # metric of the run: measurement
    "timing/step": "seconds",
    "timing/generate": "generate_seconds",
    "timing/update": "update_seconds",
    "perf/throughput": "tokens_per_s",
    "perf/mfu/actor": "mfu",
    "rollout/tokens_per_second": "sampled_tokens_per_s",
    "memory/policy_cuda_peak_gib": "policy_peak_gib",
    "sync/probe_gap": "probe_gap",
}


def run(kit: Kit, part: str) -> None:
    need("vllm", "ray")
    model = kit.model("qwen2.5-0.5b" if part == "0.5b" else "qwen2.5-1.5b")
    words = [*WORDS[part], f"actor_rollout_ref.model.path={model}", *FEW, *([] if kit.on_gpu else SMALL)]
    metrics = train(kit, f"step_{part}", *words, defaults=())
    for metric, name in MEASURED.items():
        if metric in metrics[-1]:  # the first iterations compile kernels
            kit.record(name, metrics[-1][metric])
