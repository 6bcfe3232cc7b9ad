#!/bin/bash
# Two nodes with four GPUs each. On both nodes, with the name of the first:
#   HEAD=node-a NODES=2 bash examples/torchrun/train.sh
# A rank that dies ends its node's agent and the others, and all ranks are started again, up to three times; each time the run goes on
# from its last checkpoint. docs/clusters.md explains it.
set -euo pipefail

# Where a name does not lead to its node, as with Debian's 127.0.1.1 or two networks, give the address instead, on both nodes
#   HEAD=10.0.0.1 PET_LOCAL_ADDR=<this node's own address>
# and on the first also PET_RDZV_CONF=is_host=true: it cannot see that the address is its own. torchrun reads its options from PET_*.

# Which network NCCL takes: the interface of the sockets over which ranks find each other, and the InfiniBand cards of the data.
# export NCCL_SOCKET_IFNAME=eth0
# export NCCL_IB_HCA=mlx5          # all cards of that name; NCCL_IB_DISABLE=1 where there is no InfiniBand
# export NCCL_DEBUG=INFO           # which of them it chose, and how it joined the GPUs
# export GLOO_SOCKET_IFNAME=eth0   # one name; for accelerator="cpu", and for what ranks tell each other beside NCCL

# Each start has a store of its own. With one for all (torch 2.13's default) ranks on gloo find the addresses of those before them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec "${PYTHON:-.venv/bin/python}" -m torch.distributed.run \
    --nnodes="${NODES:-2}" \
    --nproc-per-node="${PROCESSES:-4}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="${HEAD:?the host name of the first node}:${PORT:-29400}" \
    --rdzv-id="${RUN:-gradavg}" \
    --max-restarts=3 \
    -m examples.cluster "$@"
