"""Language models with FSDP2: loading, forward passes, training state, checkpoints and export.

load.py -> PolicyModel, ValueModel, ScoreModel -> sharding.py -> training/, checkpoint/, export/
data.batch.Rows -> MicroBatch (micro_batch.py) -> decoder.py, attention/ -> lm_head.py -> log-probs [n]
"""
