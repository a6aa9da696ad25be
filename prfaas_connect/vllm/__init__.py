"""vLLM connector of prfaas: `kv_connector_module_path` is `prfaas_connect.vllm.connector`."""
