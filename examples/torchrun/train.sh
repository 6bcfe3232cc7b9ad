#!/bin/bash
# Two nodes with four GPUs each. On both nodes, with the address of the first:
#   HEAD=node-a NODES=2 bash examples/torchrun/train.sh
# A rank that dies ends its node's agent and the others, and all ranks are started again, up to three times; each time the run goes on
# from its last checkpoint.
set -euo pipefail

# export NCCL_SOCKET_IFNAME=eth0   # the network between the nodes, where NCCL chooses another

exec "${PYTHON:-.venv/bin/python}" -m torch.distributed.run \
    --nnodes="${NODES:-2}" \
    --nproc-per-node="${PROCESSES:-4}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="${HEAD:?the host name of the first node}:${PORT:-29400}" \
    --rdzv-id="${RUN:-gradavg}" \
    --max-restarts=3 \
    -m examples.cluster "$@"
