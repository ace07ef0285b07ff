"""SFT in a loop of one's own: python -m examples.own_loop.sft MODEL [KEY=VALUE ...]"""

import sys

from transformers import AutoTokenizer

from alphaapollo import Trainer, make_row

CHATS = [(f"{a} + {b} = ?", f"{a + b}") for a in range(10) for b in range(10)]


def main(model: str, *overrides: str, epochs: int = 3, size: int = 20) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in CHATS]
    starts = [len(tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"]) for chat in chats]
    tokens = [tokenizer.apply_chat_template(chat)["input_ids"] for chat in chats]
    rows = [make_row(ids, [i >= start for i in range(len(ids))]) for ids, start in zip(tokens, starts, strict=True)]
    with Trainer({"model.path": model}, *overrides, engines=0) as t:
        for step in range(t.step + 1, epochs * len(rows) // size + 1):
            first = (step - 1) * size % len(rows)
            loss = t.forward_backward(rows[first : first + size]).loss
            t.log(step, metrics={"train/loss": loss, **{f"train/{k}": v for k, v in t.optim_step(lr=1e-3).items()}})
        t.save()


if __name__ == "__main__":
    main(*sys.argv[1:])
