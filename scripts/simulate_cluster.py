"""Find where the controller saturates: the real loop, handles and RayRanks on fake workers with realistic latencies.

    .venv/bin/python scripts/simulate_cluster.py                        # 8 to 1,024 workers, a table
    .venv/bin/python scripts/simulate_cluster.py --workers 1024 --profile outputs/profile.txt

A worker is a GPU with a training rank and an engine. Waits are skipped and the controller's work is measured
(scripts/simulation/clock.py); each size runs in a separate process. `train`, `collect`, `learn`, the batch, verified
weight sync, metrics.jsonl and the rollout log are real. The workers' latencies are assumptions (--help), and Ray's part
of a call is in scripts/bench/results/scale_simulated.md. The last line is a JSON object; `ratio` is the target of 5 %
divided by the controller's share of a step at the largest size. Above 1, the target is met.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.bench._task import machine  # noqa: E402
from scripts.simulation.workers import Latencies  # noqa: E402

SIZES = [8, 32, 128, 512, 1024]
TARGET = 0.05
PHASES = ("generate", "batch", "columns", "advantage", "update", "publish", "other")


def simulate(workers: int, args: argparse.Namespace, profile: cProfile.Profile | None = None) -> dict[str, Any]:
    """Simulate one size in this process. Returns the mean metrics of all iterations but the first."""
    from alphaapollo.observability.timing import measure_resident_gib
    from scripts.simulation.run import Cluster

    latencies = Latencies(**{field.name: getattr(args, field.name) for field in fields(Latencies)})
    with tempfile.TemporaryDirectory() as folder:
        sizes = (args.trajectories, args.group, args.mini_batches, args.steps)
        cluster = Cluster(workers, *sizes, latencies, Path(folder), args.mode)
        before = measure_resident_gib()
        start = time.perf_counter()
        steps = cluster.run(profile)
        seconds = time.perf_counter() - start
        written = sum(file.stat().st_size for file in Path(folder).rglob("*.jsonl"))
    count = workers * args.trajectories
    kept = steps[1:] or steps

    def mean(values: Any) -> float:
        return float(sum(values) / len(kept))

    step = mean(one.seconds for one in kept)
    work = mean(sum(one.work.values()) for one in kept)
    calls = cluster.network.calls / len(steps)
    threads = cluster.work_of_threads / len(steps) + calls * latencies.ray_threads
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "workers": workers,
        "trajectories": count,
        "step_seconds": step,
        "trajectories_per_hour": count / step * 3600,
        "controller_share": work / step,
        "share_of_all_threads": (work + threads) / step,
        "ms_per_trajectory": work / count * 1e3,
        "ms_per_trajectory_of_threads": threads / count * 1e3,
        "saturation_per_hour": count / work * 3600,
        "seconds": {name: mean(one.work.get(name, 0.0) for one in kept) for name in PHASES},
        "longest_stretch_seconds": max(cluster.loop.stretches),
        "longest_stretch_while_generating_seconds": max(one.stretch for one in kept),
        "calls": calls,
        "received_mib": cluster.network.received / len(steps) / 2**20,
        "sent_mib": cluster.network.sent / len(steps) / 2**20,
        "written_mib": written / len(steps) / 2**20,
        "rss_gib": peak,
        "rss_kib_a_trajectory": (peak - before) * 2**20 / count,
        "real_seconds": seconds,
    }


def in_a_process(workers: int, argv: list[str]) -> dict[str, Any]:
    """Simulate one size in a separate process, to measure its memory."""
    command = [sys.executable, __file__, *argv, "--workers", str(workers), "--here"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def table(sizes: list[dict[str, Any]]) -> str:
    """Table in the format of scripts/bench/results/scale_simulated.md."""
    head = ["workers", "trajectories", "per hour", "step", "controller", "share", "with threads", "ms per trajectory",
            "saturates at, per hour", "longest stretch", "memory"]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for one in sizes:
        cells = [
            f"{one['workers']:,}",
            f"{one['trajectories']:,}",
            f"{one['trajectories_per_hour']:,.0f}",
            f"{one['step_seconds']:.1f} s",
            f"{sum(one['seconds'].values()):.2f} s",
            f"{one['controller_share']:.1%}",
            f"{one['share_of_all_threads']:.1%}",
            f"{one['ms_per_trajectory']:.3f}",
            f"{one['saturation_per_hour']:,.0f}",
            f"{one['longest_stretch_seconds']:.2f} s",
            f"{one['rss_gib']:.2f} GiB",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| seconds of work | " + " | ".join(PHASES) + " |", "|" + "---|" * (len(PHASES) + 1)]
    for one in sizes:
        spans = [f"{one['seconds'][name]:.2f}" for name in PHASES]
        lines.append(f"| {one['workers']:,} workers | " + " | ".join(spans) + " |")
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=SIZES, help="sizes of the cluster")
    parser.add_argument(
        "--mode", choices=["sync", "carry", "separate"], default="sync", help="sync, or a mode of the asynchronous loop"
    )
    parser.add_argument("--trajectories", type=int, default=16, help="per worker and iteration")
    parser.add_argument("--group", type=int, default=8, help="samples per prompt (env.rollout.n)")
    parser.add_argument("--mini-batches", type=int, default=4, help="per iteration")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", type=Path, help="write a cProfile table of the last size to this file")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    for field in fields(Latencies):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default, help="default: %(default)s")
    args = parser.parse_args(argv)
    wrong = [size for size in args.workers if size < 1 or size * args.trajectories % args.group]
    if wrong:
        parser.error(f"--workers {wrong[0]} x --trajectories {args.trajectories} is not a multiple of --group")
    if args.steps < 2 and not args.here:
        parser.error(f"--steps {args.steps}: must be at least 2, because the first iteration is a warm-up")
    return args


def main(argv: list[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else argv
    args = parse(given)
    if args.here:
        print(json.dumps(simulate(args.workers[0], args)))
        return
    if args.profile:
        profile = cProfile.Profile(time.thread_time)
        sizes = [simulate(args.workers[-1], args, profile)]
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(60)
        args.profile.parent.mkdir(parents=True, exist_ok=True)
        args.profile.write_text(text.getvalue())
    else:
        sizes = [in_a_process(workers, given) for workers in args.workers]
    print(table(sizes), file=sys.stderr)
    last = sizes[-1]
    latencies = asdict(Latencies(**{field.name: getattr(args, field.name) for field in fields(Latencies)}))
    result = {
        "benchmark": "simulate_cluster",
        "mode": args.mode,
        "controller_share": float(f"{last['controller_share']:.4g}"),
        "ratio": round(TARGET / last["controller_share"], 3),
        "sizes": [rounded(one) for one in sizes],
        "assumed": latencies,
        **machine(),
    }
    print(json.dumps(result))


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
