"""The entry point of the group `vllm.general_plugins`: makes RetainConnector known to vLLM by name."""

from __future__ import annotations

NAME = "RetainConnector"


def register() -> None:
    """Called by vLLM in each of its processes, perhaps more than once. Imports nothing heavy."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "retain.engines.vllm.connector", NAME)
