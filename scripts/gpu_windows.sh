#!/usr/bin/env bash
# Tests of the device tier between processes that share one GPU: build, MPS, tests.
#
#   scripts/gpu_windows.sh [PYTEST_ARGUMENT...]
#
# PYTHON, NCCL_HOME: see scripts/shared_gpu.sh. scripts/gpu_tests.sh runs these tests among others.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/shared_gpu.sh
. scripts/shared_gpu.sh

step "native module"
build_native || exit 1
"$PYTHON" -c 'from ep_dispatcher import native; print(native.capabilities())'
step "MPS"
start_mps || exit 1
step "tests"
timeout "${LIMIT_S:-400}" "$PYTHON" -m pytest tests/test_device.py tests/test_native.py tests/test_c_abi*.py "$@"
