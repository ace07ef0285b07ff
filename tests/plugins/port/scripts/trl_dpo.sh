# DPO by TRL's command line and by a script of its repository, on four processes.
BETA=${BETA:-0.2}
trl dpo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/ultrafeedback_binarized --num_processes 4 \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --beta $BETA --loss_type ipo --bf16 \
    --learning_rate 5e-7 --max_length 2048 --eval_strategy no --output_dir first
accelerate launch --num_processes 4 --config_file zero3.yaml trl/scripts/kto.py --model_name_or_path="$HOME/model" \
    --dataset_name trl-lib/kto-mix-14k --desirable_weight 1.5 --max_steps 100 --use_peft --lora_target_modules all-linear
