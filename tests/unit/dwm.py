"""DynamoWorkerMetadata as workers write it, for tests."""

from __future__ import annotations

from typing import Any

PATH = "/apis/nvidia.com/v1alpha1/namespaces/{}/dynamoworkermetadatas"


def zmq(endpoint: object) -> dict[str, Any]:
    """Return a transport of ZeroMQ."""
    return {"kind": "Zmq", "config": {"endpoint": endpoint}}


def channel(endpoint: object, **changes: Any) -> dict[str, Any]:
    """Return a channel as older workers write it."""
    made = {
        "type": "EventChannel",
        "namespace": "dynamo",
        "component": "backend",
        "topic": "kv-events",
        "instance_id": 42,
        "transport": zmq(endpoint),
    }
    return made | changes


def resource(channels: Any, *, name: str = "w0-main", namespace: str = "gpu", **data: Any) -> dict[str, Any]:
    """Return a resource with these channels."""
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoWorkerMetadata",
        "metadata": {"name": name, "namespace": namespace, "resourceVersion": "7"},
        "spec": {"data": {"event_channels": channels, **data}},
    }


def listed(*items: Any, version: str = "9", more: str = "") -> dict[str, Any]:
    """Return the page of a list."""
    metadata = {"resourceVersion": version} | ({"continue": more} if more else {})
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoWorkerMetadataList",
        "metadata": metadata,
        "items": list(items),
    }


def worker(number: int, *, publishers: int = 4) -> dict[str, Any]:
    """Return the resource of one of many workers."""
    address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
    channels = {
        f"namespace/dynamo/topic/t{port}/{number:x}": channel(f"tcp://{address}:{40_000 + port}", instance_id=number)
        for port in range(publishers)
    }
    return resource(channels, name=f"w{number}")
