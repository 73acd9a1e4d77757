#!/bin/bash
# Two nodes with two GPUs each by Slurm, in a container. Once, on the login node:
#
#   apptainer build samebits.sif docker-archive://samebits.tar      (docs/containers.md makes samebits.tar)
#   sbatch examples/slurm/container.sh
#
# With pyxis and enroot instead of Apptainer, replace `apptainer exec ... "$image"` by srun's options
#   --container-image="$image" --container-mounts="$PWD:/workspace" --container-workdir=/workspace
#
#SBATCH --job-name=samebits-mnist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --time=4:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

image=${IMAGE:-samebits.sif}
run=${RUN:-runs/mnist}

# Ranks sign their messages with a key of this start. srun and Apptainer pass the environment on.
export SAMEBITS_KEY="${SAMEBITS_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
# --nv: the GPUs. --cleanenv must not be given: ranks and addresses are in Slurm's variables.
# Apptainer shares the host's /dev/shm, so there is no limit of 64 MB to raise.
srun --kill-on-bad-exit=0 \
    apptainer exec --nv --bind "$PWD:/workspace" --pwd /workspace "$image" \
    samebits train "${RECIPE:-mnist}" --run-dir "/workspace/$run" --resume auto
code=$?
# 138: Slurm has warned of the time limit, and the run has saved. The requeued job resumes it.
if [ "$code" -eq 138 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
