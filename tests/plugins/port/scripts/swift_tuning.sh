NPROC_PER_NODE=2 swift sft --model Qwen/Qwen3-0.6B --dataset a/first#500 b/second --max_length 4096 --enable_thinking false \
    --learning_rate 2e-4 --loss_scale last_round --packing true --router_aux_loss_coef 0.001
swift rlhf --rlhf_type simpo --model Qwen/Qwen3-0.6B --dataset pairs.jsonl --tuner_type full --rpo_alpha 0.1
NNODES=2 NPROC_PER_NODE=8 megatron rlhf --rlhf_type dpo --model Qwen/Qwen3-30B-A3B --dataset a/pairs --lr 1e-5 --min_lr 1e-6 \
    --global_batch_size 64 --micro_batch_size 1 --tensor_model_parallel_size 4 --expert_model_parallel_size 4
