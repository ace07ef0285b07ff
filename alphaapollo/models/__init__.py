"""Language models under FSDP2: loading, log-probs in chunks, attention over unpadded rows, optimizer, checkpoints.

load -> PolicyModel | CriticModel (policy.py, critic.py) -> sharding -> optimizer, checkpoint
data.batch.Rows -> MicroBatch (micro_batch.py) -> trunk (attention.py) -> head (lm_head.py) -> log-probs [n]
"""
