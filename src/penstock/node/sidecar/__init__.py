"""The sidecar: stands between the queue and the frameworks in a node's units. It alone holds workers' credentials."""
