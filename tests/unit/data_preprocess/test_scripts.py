"""The scripts, started as commands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from alphaapollo.data.prompts import load_prompts

ROOT = Path(__file__).resolve().parents[3]
GSM8K = ROOT / "../shared/data/gsm8k_train.jsonl"

pytestmark = pytest.mark.timeout(60)


def run(name, *args):
    command = [sys.executable, "-m", f"examples.data_preprocess.{name}", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K files are not at hand")
def test_gsm8k_from_a_local_file(tmp_path):
    done = run("prepare_informal_math", "--data_source", GSM8K, "--local_dir", tmp_path, "--val_size", 73)
    assert done.returncode == 0, done.stderr
    assert "train.parquet (data_source gsm8k): 7400 rows kept, 0 dropped" in done.stdout
    assert "val.parquet (data_source gsm8k): 73 rows kept, 0 dropped" in done.stdout
    assert "A sample row" in done.stdout
    train, val = (load_prompts(str(tmp_path / f"{split}.parquet"), "prompt") for split in ("train", "val"))
    assert (len(train), len(val)) == (7400, 73)
    assert train[0].ground_truth == "72"
    assert train[0].content[0]["content"].startswith("Natalia sold clips")
    assert not {p.extra_info["question"] for p in train} & {p.extra_info["question"] for p in val}


def test_dirty_rows_are_dropped_and_counted(tmp_path):
    rows = [
        {"question": "1+1?", "answer": r"\boxed{2}"},
        {"question": "no answer"},
        {"answer": "no question"},
        {},
        {"question": 5, "answer": 5},
        {"question": {"a": 1}, "answer": "1"},
        {"question": "", "answer": "1"},
        {"question": "数学 🙂?", "answer": "#### 3"},
    ]
    source = tmp_path / "dirty.jsonl"
    source.write_text("\n".join(["", *map(json.dumps, rows), "  "]))
    done = run("prepare_informal_math", "--data_source", source, "--local_dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "(data_source math/dirty): 3 rows kept, 5 dropped\n  2 dropped: no question" in done.stdout
    for reason in ("1 dropped: no answer", "the question is not text", "the question is empty"):
        assert reason in done.stdout
    prompts = load_prompts(str(tmp_path / "out" / "train.parquet"), "prompt")
    assert [prompt.ground_truth for prompt in prompts] == ["2", "5", "3"]


@pytest.mark.parametrize(
    ("text", "args", "what"),
    [
        ('{"x": 1}', [], "split train has no usable row: 0 rows kept, 1 dropped"),
        ('{"question": "q"', [], "1 dropped: not valid JSON"),
        ("", [], "has no rows"),
        ('{"question": "q", "answer": "1"}', ["--val_size", "5"], "split train has only 1 rows"),
        ('{"question": "q", "answer": "1"}', ["--val_size", "-5"], "--val_size -5: must not be negative"),
        ('{"question": "q", "answer": "1"}', ["--local_dir", "/dev/null"], "cannot be written"),
    ],
)
def test_an_unusable_source_is_one_line_and_leaves_nothing(tmp_path, text, args, what):
    source = tmp_path / "source.jsonl"
    source.write_text(text)
    done = run("prepare_informal_math", "--data_source", source, "--local_dir", tmp_path / "out", *args)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and what in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_seed_rows_for_environments(tmp_path):
    done = run("prepare", "--mode", "text", "--train_data_size", 16, "--val_data_size", 128, "--local_dir", tmp_path)
    assert done.returncode == 0, done.stderr
    train, test = (load_prompts(str(tmp_path / f"{split}.parquet"), "prompt") for split in ("train", "test"))
    assert (len(train), len(test)) == (16, 128)
    seeds = [prompt.env_kwargs["seed"] for prompt in train + test]
    assert len(set(seeds)) == 144
    assert train[3].data_source == "text" and train[3].extra_info == {"split": "train", "index": 3}


def test_no_rows_requested_is_an_error(tmp_path):
    done = run("prepare", "--train_data_size", 0, "--local_dir", tmp_path)
    assert done.returncode == 1
    assert "the size of train is 0; it must be at least 1" in done.stderr
