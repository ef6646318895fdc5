"""vLLM on Retain: a KV connector that vLLM finds by itself once both are installed.

    --kv-transfer-config '{"kv_connector":"RetainConnector","kv_role":"kv_both"}'

`connector.py` is what vLLM calls; `scheduler.py` decides, in the scheduler's process, what is loaded and
stored; `worker.py` moves the bytes, in every worker's; `layout.py` knows how vLLM's pages are laid out.
"""
