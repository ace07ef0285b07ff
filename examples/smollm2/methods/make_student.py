"""Make a smaller model from a larger one: its first and its last layers, without those in the middle.

python -m examples.smollm2.methods.make_student --teacher outputs/demo/model --out outputs/demo/student
"""

from __future__ import annotations

import argparse
from pathlib import Path


def make_student(teacher: Path, folder: Path, num_layers: int) -> int:
    """Write a student with `num_layers` of the teacher's layers and its tokenizer. Returns its number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    layers, first = model.model.layers, (num_layers + 1) // 2
    del layers[first : len(layers) - (num_layers - first)]
    model.config.num_hidden_layers = num_layers
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder)
    return int(model.num_parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, default=Path("outputs/demo/model"))
    parser.add_argument("--out", type=Path, default=Path("outputs/demo/student"))
    parser.add_argument("--num_layers", type=int, default=24)
    args = parser.parse_args()
    print(f"{make_student(args.teacher, args.out, args.num_layers):,} parameters in {args.out}")


if __name__ == "__main__":
    main()
