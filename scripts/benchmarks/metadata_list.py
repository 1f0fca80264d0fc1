"""The first list of a broker, as programs: an API server that has all pages ready, and two that read them.

    metadata_list.py serve|ours|official '{"...": ...}'

Each is a process of its own. The server says where it is and what it has, and ends with its standard input; a reader
says what the list took it and ends.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable

NAMESPACE, DYNAMO_NAMESPACE = "gpu", "dynamo"
PATH = f"/apis/nvidia.com/v1alpha1/namespaces/{NAMESPACE}/dynamoworkermetadatas"
PAGE_RESOURCES = 32
_TOPICS = ("kv-events", "kv_metrics", "kv-events-g2", "worker-load")
_VERSION = "481516"
_MODELS = ("deepseek-r1-distill-llama-70b", "qwen3-235b-a22b-instruct")


# What is listed.


def worker(number: int, chance: random.Random) -> dict[str, Any]:
    """Return the resource of a worker as Dynamo writes it: request-plane endpoints, a card per model, channels."""
    name, address = f"vllm-decode-{number // 8:05x}-{number % 8}", f"10.{64 + (number >> 14)}.{number >> 6 & 255}"
    host, instance = f"{address}.{4 * (number & 63) + 1}", chance.getrandbits(62)
    keys = [f"{DYNAMO_NAMESPACE}/backend/{topic}/{instance:x}" for topic in _TOPICS]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": _digest(chance)[:36], "controller": True}
    fields: dict[str, Any] = {
        f"f:{key}": {".": {}, "f:transport": {"f:config": {"f:endpoint": {}}, "f:kind": {}}} for key in keys
    }
    managed = {
        "manager": "dynamo",
        "operation": "Apply",
        "fieldsV1": {"f:spec": {"f:data": {"f:event_channels": fields}}},
    }
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoWorkerMetadata",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": _digest(chance)[:36],
            "resourceVersion": str(400_000 + number),
            "creationTimestamp": "2026-03-02T04:05:06Z",
            "ownerReferences": [owner],
            "managedFields": [managed],
        },
        "spec": {
            "data": {
                "endpoints": {
                    f"{DYNAMO_NAMESPACE}/backend/{each}/{instance:x}": {
                        "type": "Endpoint",
                        "namespace": DYNAMO_NAMESPACE,
                        "component": "backend",
                        "endpoint": each,
                        "instance_id": instance,
                        "transport": {"tcp": f"{host}:9090/{instance:x}/{each}"},
                    }
                    for each in ("generate", "clear_kv_blocks", "load_metrics")
                },
                "model_cards": {
                    f"{DYNAMO_NAMESPACE}/backend/generate/{instance:x}/{model}": _card(model, chance)
                    for model in _MODELS
                },
                "event_channels": {
                    key: _channel(topic, f"tcp://{host}:{41_000 + port}", instance)
                    for port, (key, topic) in enumerate(zip(keys, _TOPICS, strict=True))
                },
            }
        },
    }


def _channel(topic: str, endpoint: str, instance: int) -> dict[str, Any]:
    return {
        "type": "EventChannel",
        "scope": {"kind": "component", "namespace": DYNAMO_NAMESPACE, "component": "backend"},
        "topic": topic,
        "instance_id": instance,
        "transport": {"kind": "Zmq", "config": {"endpoint": endpoint}},
    }


def _card(model: str, chance: random.Random) -> dict[str, Any]:
    """Return the card of a model: files with their digests, and a chat template, of which most of it is."""
    files = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    template = "{%- for message in messages %}\n  {{- '<|im_start|>' + message.role + \"\\n\" }}{%- endfor %}\n" * 16
    return {
        "display_name": model,
        "slug": model,
        "files": {
            each: {"path": f"nats://models/{model}/{each}", "checksum": f"blake3:{_digest(chance)}"} for each in files
        },
        "prompt_formatter": {"chat_template": template},
        "context_length": 131_072,
        "kv_cache_block_size": 64,
        "migration_limit": 3,
        "model_type": ["chat", "completions"],
        "runtime_config": {
            "total_kv_blocks": chance.randrange(10_000, 90_000),
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8_192,
            "tool_call_parser": None,
            "reasoning_parser": "deepseek_r1",
        },
    }


def _digest(chance: random.Random) -> str:
    return f"{chance.getrandbits(256):064x}"


def pages_of(resources: int) -> list[bytes]:
    """Return all pages of a list, as they go over the wire."""
    chance = random.Random(7)
    made: list[bytes] = []
    for begin in range(0, resources, PAGE_RESOURCES):
        end = min(begin + PAGE_RESOURCES, resources)
        more = {"continue": str(len(made) + 1), "remainingItemCount": resources - end} if end < resources else {}
        page = {
            "apiVersion": "nvidia.com/v1alpha1",
            "kind": "DynamoWorkerMetadataList",
            "metadata": {"resourceVersion": _VERSION} | more,
            "items": [worker(number, chance) for number in range(begin, end)],
        }
        made.append(json.dumps(page, separators=(",", ":")).encode())
    return made


def serve(told: dict[str, Any]) -> None:
    """Serve the pages, and watches that stay silent, until the standard input ends."""
    pages = pages_of(told["resources"])

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            if parts.path != PATH or query.get("limit") != str(PAGE_RESOURCES):
                # A watch, by whoever got all of the list. It stays silent until he leaves.
                self.connection.recv(1)
                self.close_connection = True
                return
            page = pages[int(query.get("continue", "0"))]
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        say(port=server.server_port, list_bytes=sum(map(len, pages)), pages=len(pages))
        sys.stdin.read()
        server.shutdown()


# Who reads it.


def ours(told: dict[str, Any]) -> None:
    """Read the list as a broker does."""
    # Beforehand, since what is measured is the list.
    import kubernetes.aio.client.rest
    import kubernetes.aio.config  # noqa: F401

    from kura_shaper.broker.directory import MetadataDirectory
    from kura_shaper.tenants.kubernetes.access import Access, HttpApi
    from kura_shaper.tenants.kubernetes.pace import SystemAsyncClock

    async def read() -> int:
        clock = SystemAsyncClock()
        async with HttpApi(Access(Path(told["kubeconfig"]), clock=clock)) as api:
            directory = MetadataDirectory(api, (NAMESPACE,), clock=clock, random=random.Random(1))
            following = asyncio.ensure_future(directory.run())
            await directory.synced()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            kept.append(directory)
            return directory.references

    kept: list[object] = []
    measured(lambda: asyncio.run(read()))


def official(told: dict[str, Any]) -> None:
    """Read the list with the official client, and keep the same of it, with fewer questions asked."""
    from kubernetes import client, config

    def read() -> int:
        config.load_kube_config(told["kubeconfig"])
        api = client.CustomObjectsApi()
        more: dict[str, str] = {}
        while True:
            page = api.list_namespaced_custom_object(
                "nvidia.com", "v1alpha1", NAMESPACE, "dynamoworkermetadatas", limit=PAGE_RESOURCES, **more
            )
            for item in page["items"]:
                channels = item["spec"]["data"]["event_channels"].values()
                kept[item["metadata"]["name"]] = tuple(
                    (each["transport"]["config"]["endpoint"], each["scope"]["namespace"])
                    for each in channels
                    if each["transport"]["kind"] == "Zmq"
                )
            if not page["metadata"].get("continue"):
                return sum(map(len, kept.values()))
            more = {"_continue": page["metadata"]["continue"]}

    kept: dict[str, tuple[tuple[str, str], ...]] = {}
    measured(read)


def measured(read: Callable[[], int]) -> None:
    """Say what reading took: seconds, those of a processor, and how much more memory at the most than before."""
    # The most that this process ever had is from here on counted anew.
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes, began_s, spent_s = _memory_bytes("VmRSS"), time.perf_counter(), _processor_s()
    references = read()
    say(
        wall_s=time.perf_counter() - began_s,
        processor_s=_processor_s() - spent_s,
        peak_bytes=_memory_bytes("VmHWM") - before_bytes,
        references=references,
    )


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _memory_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def say(**found: float) -> None:
    """Print one object."""
    print(json.dumps(found), flush=True)


PROGRAMS = {"serve": serve, "ours": ours, "official": official}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](json.loads(sys.argv[2]))
