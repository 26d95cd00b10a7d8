#!/bin/bash
# Two machines of eight GPUs (docs/how_to/multi_gpu.md): sbatch examples/slurm.sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --signal=TERM@300

# Six GPUs of each machine train; the engine has two of the first machine.
export FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5
srun --kill-on-bad-exit=1 bash -c 'exec tune run --nnodes "$SLURM_NNODES" --node_rank "$SLURM_NODEID" --nproc_per_node 6 \
    --rdzv_endpoint "$FIRST:29500" --rdzv_id "$SLURM_JOB_ID" \
    grpo_full --config grpo/qwen2_5_14B_full output_dir=/shared/runs/14B model_dir=/shared/models/Qwen2.5-14B-Instruct \
    ranks.shard_within=6 resume_from_checkpoint=True'
