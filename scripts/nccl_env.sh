# shellcheck shell=bash
# Source this before the ranks start on several nodes: NCCL's environment for the device tier across
# NVLink domains. Each line is a default; what you export yourself stays. docs/multi_node.md says more.

# Memory by virtual addresses, and windows over it: both are NCCL's defaults, and needed.
export NCCL_CUMEM_ENABLE=${NCCL_CUMEM_ENABLE:-1}
export NCCL_WIN_ENABLE=${NCCL_WIN_ENABLE:-1}
# GIN, by which a kernel puts to another node. NCCL takes GDAKI (the GPU rings the adapter's doorbell)
# where it can. If a job hangs with it, try the proxy, in which a CPU thread posts:
#   export NCCL_GIN_TYPE=2
export NCCL_GIN_ENABLE=${NCCL_GIN_ENABLE:-1}
# GPU i talks to GPU i of other nodes only. 0 keeps NCCL from joining adapters of different rails,
# which hangs where the switches do not (NVIDIA/nccl issue 2203); export 1 or 2 if yours do.
export NCCL_CROSS_NIC=${NCCL_CROSS_NIC:-0}
# Two ports of one adapter stay two: a rail is one of them (see DeepEP issue 629).
export NCCL_IB_MERGE_NICS=${NCCL_IB_MERGE_NICS:-0}
# Bulk traffic on the RDMA adapters; name them if a node has others, for example for storage:
#   export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7
# RoCE: the traffic class and GID that your switches treat as lossless:
#   export NCCL_IB_TC=106 NCCL_IB_GID_INDEX=3
# Bootstrap over the interface that joins the nodes, if NCCL and gloo pick another one:
#   export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
# Says at start what NCCL could not use.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# One hardware queue for each stream, or communication waits for compute. `train` sets it by its
# config, so for other programs only, and not with tensor parallelism, where Megatron relies on 1:
#   export CUDA_DEVICE_MAX_CONNECTIONS=32
# Code is loaded before a kernel waits for a peer, not while it does.
export CUDA_MODULE_LOADING=${CUDA_MODULE_LOADING:-EAGER}
