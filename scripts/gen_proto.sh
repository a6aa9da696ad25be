#!/usr/bin/env bash
# Regenerates the gRPC stubs with the oldest grpcio-tools we support, in an environment of its own.
# scripts/gen_proto.sh [DIRECTORY]: writes below DIRECTORY, by default into the working tree.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-.}"
venv="${PRFAAS_PROTO_VENV:-.cache/proto-venv}"
# Asked of the package, not of the directory: an installation may have been interrupted.
if ! "$venv/bin/python" -c 'import grpc_tools.protoc' 2>/dev/null; then
  "${PYTHON:-python3}" -m venv --clear "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check \
    'grpcio-tools==1.76.0' 'protobuf==6.31.1' 'setuptools<81'
fi
"$venv/bin/python" -m grpc_tools.protoc -I proto \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" proto/prfaas/rpc/v1/prefill.proto
