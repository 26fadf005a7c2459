CLOUD_REGISTRY: dict[str, object] = {}
