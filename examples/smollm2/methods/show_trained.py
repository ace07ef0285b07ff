"""Print the first example of a fine-tuning run, and which of its tokens are trained on.

python -m examples.smollm2.methods.show_trained outputs/demo/sft
"""

from __future__ import annotations

import argparse
from pathlib import Path

from alphaapollo.runs.training_examples import read_examples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    args = parser.parse_args()
    for row in read_examples(args.run)[0].rows:
        for num_tokens, is_trained, text in row.parts:
            print(f"{num_tokens:4} tokens {'trained' if is_trained else 'context'}  {text!r}")


if __name__ == "__main__":
    main()
