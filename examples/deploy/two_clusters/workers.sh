#!/usr/bin/env bash
# The workers of one cluster: one for each GPU of this host. Start it on each host of both clusters:
#   ./workers.sh https://coordinator.example.org:7077 cluster-a
set -euo pipefail

export BYTESCHEDULER_COORDINATOR=${1:?address of the coordinator}
CLUSTER=${2:?name of this cluster, such as cluster-a}

BYTESCHEDULER_COORDINATOR_TOKEN=$(cat token)
export BYTESCHEDULER_COORDINATOR_TOKEN

# train.py makes its strategy as
#   DiLoCoStrategy(coordinator={"authority": "server.pem", "name": ...})
# of these arguments; the address and the token come from the environment.
pids=()
gpus=$(nvidia-smi --list-gpus | wc -l)
for ((gpu = 0; gpu < gpus; gpu++)); do
  CUDA_VISIBLE_DEVICES=$gpu python train.py \
    --ca server.pem \
    --worker-name "$CLUSTER/$(hostname)/$gpu" &
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}"' TERM INT
for pid in "${pids[@]}"; do
  wait "$pid" || true
done
