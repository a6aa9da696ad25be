# vLLM with the connector: NumPy is all that it needs, and vLLM brings that.
#   docker build -f deploy/docker/vllm.Dockerfile -t prfaas-vllm .
FROM vllm/vllm-openai:v0.32.0
COPY prfaas_connect /src/prfaas_connect
RUN python3 -m pip install --no-cache-dir --no-deps /src/prfaas_connect
