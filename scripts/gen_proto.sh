#!/usr/bin/env bash
# Regenerates the gRPC stubs with the oldest grpcio-tools we support, in an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-.}"
venv="${PRFAAS_PROTO_VENV:-.cache/proto-venv}"
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q 'grpcio-tools==1.76.0' 'protobuf==6.31.1' 'setuptools<81'
fi
"$venv/bin/python" -m grpc_tools.protoc -I proto --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  proto/prfaas/rpc/v1/prefill.proto
