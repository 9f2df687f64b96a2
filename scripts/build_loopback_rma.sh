#!/usr/bin/env bash
# Builds the loopback RMA plugin (docs/loopback_rma.md) with a C++17 compiler; needs no CUDA.
#
#   scripts/build_loopback_rma.sh [OUTPUT]     default: build/libloopback_rma.so
#
# CXX, CXXFLAGS   compiler (default: g++) and further flags, for example -fsanitize=thread
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

output=${1:-build/libloopback_rma.so}
mkdir -p "$(dirname "$output")"
# shellcheck disable=SC2086
"${CXX:-g++}" -std=c++17 -O2 -g -fPIC -shared -fvisibility=hidden -Wall -Wextra -Werror \
  ${CXXFLAGS:-} -o "$output" csrc/testing/loopback_rma/*.cpp -ldl -pthread
