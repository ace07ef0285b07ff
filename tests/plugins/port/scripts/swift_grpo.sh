# GRPO with a reward plugin: processes are set in the environment, and a server of ms-swift is not needed.
nproc_per_node=4
CUDA_VISIBLE_DEVICES=4,5 swift rollout --model Qwen/Qwen3-4B --vllm_tensor_parallel_size 2
CUDA_VISIBLE_DEVICES=0,1,2,3 \
NPROC_PER_NODE=$nproc_per_node \
swift rlhf \
    --rlhf_type grpo \
    --model Qwen/Qwen3-4B \
    --tuner_type full \
    --external_plugins plugin.py \
    --reward_funcs my_accuracy format \
    --reward_weights 1 0.2 \
    --dataset 'AI-MO/NuminaMath-TIR#5000' \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 2 \
    --num_generations 8 \
    --max_completion_length 2048 \
    --beta 0.001 \
    --loss_type dapo \
    --dynamic_sample true \
    --overlong_filter true \
    --soft_cache_length 256 \
    --rollout_importance_sampling_mode token_truncate \
    --epsilon_high 0.28 \
    --system 'You are a helpful assistant.' \
    --deepspeed zero2 \
    --report_to tensorboard swanlab
