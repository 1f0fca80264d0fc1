"""The Kubernetes API that the brokers read: a real API server where one is installed, else a stand-in that says so.

With the real one the brokers log in as a service account that may get, list and watch the metadata of one
namespace, and nothing else.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import yaml
from place import BROKERS

from kura_shaper.lab.isolation import NETNS_DIR, inside

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_TESTS = Path(__file__).parents[2] / "tests" / "kube"
NAMESPACE = "kura"
PATH = f"/apis/nvidia.com/v1alpha1/namespaces/{NAMESPACE}/dynamoworkermetadatas"
_RBAC = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}"
_ACCOUNT = "continuum-event-broker"
STAND_IN = "a stand-in for the API server, since none is installed"


def metadata(name: str, endpoints: Sequence[str]) -> dict[str, Any]:
    """Return the resource of a worker."""
    channels = {
        f"dynamo/backend/kv-events/{number:x}": {
            "type": "EventChannel",
            "namespace": "dynamo",
            "component": "backend",
            "topic": "kv-events",
            "instance_id": number,
            "transport": {"kind": "Zmq", "config": {"endpoint": endpoint}},
        }
        for number, endpoint in enumerate(endpoints)
    }
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoWorkerMetadata",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"data": {"event_channels": channels}},
    }


@contextmanager
def api_server(workers: Sequence[dict[str, Any]], kubeconfig: Path) -> Iterator[str]:
    """Serve the metadata of workers in the brokers' namespace, and write how to reach it; yield what serves it."""
    sys.path.append(str(_TESTS))
    try:
        import kube_rig

        programs = kube_rig.programs()
    except ImportError:
        programs = None
    if programs is None:
        with _stand_in(workers) as port:
            kubeconfig.write_text(json.dumps(_kubeconfig({"server": f"http://127.0.0.1:{port}"})))
            yield STAND_IN
        return
    cluster = kube_rig.Cluster(Path(tempfile.mkdtemp(prefix="cluster-")), programs)
    try:
        with inside(NETNS_DIR / BROKERS):
            cluster.start()
            _fill(cluster, workers)
            cluster.kubeconfig(kubeconfig, token=cluster.token(_ACCOUNT, "broker-token"))
        yield "a real kube-apiserver"
    finally:
        cluster.remove()


def _fill(cluster: Any, workers: Sequence[dict[str, Any]]) -> None:
    """Create the definition, the workers, and an account that may read them."""
    crd = yaml.safe_load((_TESTS / "dwm_crd.yaml").read_text())
    cluster.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
    cluster.until(lambda: cluster.ask("GET", PATH))
    for worker in workers:
        cluster.create(PATH, worker)
    cluster.service_account(_ACCOUNT, may_read=False)
    rules = [{"apiGroups": ["nvidia.com"], "resources": [PATH.rpartition("/")[2]], "verbs": ["get", "list", "watch"]}]
    cluster.create(f"{_RBAC}/roles", {"metadata": {"name": _ACCOUNT}, "rules": rules})
    subject = {"kind": "ServiceAccount", "name": _ACCOUNT, "namespace": NAMESPACE}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": _ACCOUNT}
    cluster.create(f"{_RBAC}/rolebindings", {"metadata": {"name": _ACCOUNT}, "roleRef": role, "subjects": [subject]})


@contextmanager
def _stand_in(workers: Sequence[dict[str, Any]]) -> Iterator[int]:
    items = [
        {**each, "metadata": {**each["metadata"], "uid": f"u{number}", "resourceVersion": "1"}}
        for number, each in enumerate(workers)
    ]
    body = json.dumps({"kind": "DynamoWorkerMetadataList", "metadata": {"resourceVersion": "1"}, "items": items})
    ends = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            watches = parse_qs(url.query).get("watch", [""])[0] in ("1", "true")
            self.send_response(200 if url.path == PATH else 404)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            if watches:
                # Nothing changes in a demo.
                ends.wait()
            elif url.path == PATH:
                self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with inside(NETNS_DIR / BROKERS):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield int(server.server_address[1])
    finally:
        ends.set()
        server.shutdown()
        server.server_close()


def _kubeconfig(server: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": server}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
