python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path a/policy --reward.model_name_or_path a/reward \
   --data.prompt_dataset a/prompts --critic.adam.lr 9e-6 --ds.adam_offload --algo.kl.init_coef 0.02
deepspeed --module openrlhf.cli.train_dpo --model.model_name_or_path a/policy --data.dataset a/pairs --model.beta 0.2 \
   --model.ipo_enable --train.batch_size 256 --ds.lora.rank 16 --model.aux_loss_coef 0.001
deepspeed --module openrlhf.cli.train_rm --model.model_name_or_path a/policy --data.dataset a/pairs --data.max_len 4096
