"""Tokens/s of vLLM's decoding at 0.5B with and without CUDA graphs."""

from __future__ import annotations

import subprocess
import sys
import time

from scripts.checks import ROOT
from scripts.gpu_check.kit import Kit, need

REQUESTS, TOKENS = 64, 128


def run(kit: Kit) -> None:
    kit.need_gpu("CUDA graphs")
    need("vllm")
    folder = kit.model()
    speeds = {}
    for mode in ("eager", "graphs"):
        command = [sys.executable, "-m", "scripts.gpu_check.check_graphs", str(folder), mode]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr, sep="\n")
        assert done.returncode == 0, f"vLLM with {mode} ended with {done.returncode}"
        speeds[mode] = float(done.stdout.split()[-1])
        kit.record(f"{mode}_tokens_per_s", speeds[mode])
    kit.record("graphs_over_eager", speeds["graphs"] / speeds["eager"])


def decode(folder: str, eager: bool) -> float:
    """Tokens per second of the second of two batches."""
    from vllm import LLM, SamplingParams

    engine = LLM(folder, enforce_eager=eager, gpu_memory_utilization=0.3, max_model_len=1024, skip_tokenizer_init=True)
    prompts = [{"prompt_token_ids": [7 + number] * 16} for number in range(REQUESTS)]
    settings = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        engine.generate(prompts, settings, use_tqdm=False)
        seconds = time.perf_counter() - start
    return REQUESTS * TOKENS / seconds


if __name__ == "__main__":
    print(decode(sys.argv[1], sys.argv[2] == "eager"))
