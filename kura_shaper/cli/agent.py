"""agent, disable, enable: a node's tree kept in step, and held off."""

from __future__ import annotations

import gc
import getpass
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from kura_shaper.agent.events import FileEvents
from kura_shaper.agent.health import HealthServer
from kura_shaper.agent.loop import Agent
from kura_shaper.agent.marker import Disabled, read_marker, remove_marker, write_marker
from kura_shaper.agent.settings import AgentSettings, load_settings
from kura_shaper.agent.source import FileSource, Source
from kura_shaper.cli import show
from kura_shaper.clock import Clock, SystemClock
from kura_shaper.errors import UsageError
from kura_shaper.kernel.journal import DEFAULT_STATE_DIRECTORY
from kura_shaper.kernel.probe import probe
from kura_shaper.kernel.retransmits import open_retransmit_counter

Text = str | None


def _option(name: str, words: str, metavar: str = "V") -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(f"--{name}", metavar=metavar, help=words)
    return option


NodeFile = Annotated[Path, typer.Option("--node-file", metavar="P", help="The marker.", envvar="KURA_SHAPER_NODE_FILE")]
_DEFAULT_MARKER = DEFAULT_STATE_DIRECTORY / "disabled"


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command("agent", epilog="Example: kura-shaper agent --config /etc/kura-shaper/agent.yaml")(agent)
    app.command("disable", epilog="Example: kura-shaper disable --reason 'incident 4711'")(disable)
    app.command("enable", epilog="Example: kura-shaper enable")(enable)


def agent(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="F", help="Settings, YAML.", envvar="KURA_SHAPER_CONFIG")
    ] = None,
    file: Annotated[Text, _option("file", "The tenants document, as source.", "F")] = None,
    overlay: Annotated[Text, _option("overlay", "An overlay over it.", "F")] = None,
    region: Annotated[Text, _option("region", "The region, with Kubernetes as source.", "R")] = None,
    namespace: Annotated[Text, _option("namespace", "The namespace of its instances.", "N")] = None,
    node: Annotated[Text, _option("node", "This node's name in Kubernetes.", "N")] = None,
    kubeconfig: Annotated[Text, _option("kubeconfig", "Outside the cluster: how to reach it.", "P")] = None,
    devices: Annotated[Text, _option("devices", "auto, or names with commas between.", "D,..")] = None,
    budget: Annotated[Text, _option("budget", "node, or a rate, e.g. 3G.", "R")] = None,
    host_traffic: Annotated[Text, _option("host-traffic", "outside the budget, or inside.")] = None,
    host_reserve: Annotated[Text, _option("host-reserve", "Floor of host traffic.", "R")] = None,
    shape: Annotated[Text, _option("shape", "auto, single or mq.")] = None,
    shaped_queues: Annotated[Text, _option("shaped-queues", "Shape mq: how many tx queues hold tenants.", "N")] = None,
    leaf: Annotated[Text, _option("leaf", "fq_codel or fq.")] = None,
    listen: Annotated[Text, _option("listen", "Where metrics and health are.", "IP:PORT")] = None,
    observe: Annotated[bool, typer.Option("--observe", help="Plan, measure, and never write.")] = False,
    resync_s: Annotated[Text, _option("resync-s", "Seconds between looks without a reason.", "S")] = None,
    state_dir: Annotated[Text, _option("state-dir", "Where the former state is kept.", "P")] = None,
    node_file: Annotated[Text, _option("node-file", "The marker that holds the agent off.", "P")] = None,
) -> None:
    """Keep this node's tree as its tenants were promised, until a signal. Stopping changes nothing in the kernel.

    Each setting is a key of the file, an environment variable (KURA_SHAPER_BUDGET) or an option; the
    last wins.
    """
    given = {
        "file": file,
        "overlay": overlay,
        "region": region,
        "namespace": namespace,
        "node": node,
        "kubeconfig": kubeconfig,
        "devices": devices,
        "budget": budget,
        "host_traffic": host_traffic,
        "host_reserve": host_reserve,
        "shape": shape,
        "shaped_queues": shaped_queues,
        "leaf": leaf,
        "listen": listen,
        "observe": "true" if observe else None,
        "resync_s": resync_s,
        "state_dir": state_dir,
        "node_file": node_file,
    }
    settings = load_settings(config, os.environ, given)
    show.log_by_default(context, logging.INFO)
    _run(settings)


def _run(settings: AgentSettings) -> None:
    clock = SystemClock()
    signals = _Signals()
    stay_responsive()
    with ExitStack() as stack:
        source, paths = _source(settings, clock, stack, on_change=lambda: signals.wake("cluster"))
        files = FileEvents((*paths, settings.node_file))
        stack.callback(files.close)
        keeper = Agent(settings, source, probe(), clock=clock, files=files, count_retransmits=open_retransmit_counter)
        server = HealthServer(settings.listen, keeper.view, clock)
        stack.callback(server.close)
        signals.are_for(keeper)
        keeper.run()


def _source(
    settings: AgentSettings, clock: Clock, stack: ExitStack, *, on_change: Callable[[], None]
) -> tuple[Source, tuple[Path, ...]]:
    """Return where the tenants come from, and the files whose change counts."""
    if settings.kubernetes is None:
        if settings.file is None:
            raise UsageError("there is no source", remedy="source: {file: ...}")
        found = FileSource(settings.file, settings.overlay, clock=clock)
        return found, found.paths
    # A third of a second, and 40 MB, that an agent with a file need not have.
    from random import Random

    from kura_shaper.agent.cluster import ClusterTold, read_last_good
    from kura_shaper.tenants.kubernetes.access import Access, HttpApi
    from kura_shaper.tenants.kubernetes.instances import RegionSettings
    from kura_shaper.tenants.kubernetes.pace import SystemAsyncClock
    from kura_shaper.tenants.kubernetes.source import ClusterSource
    from kura_shaper.tenants.kubernetes.thread import FollowedCluster

    told, async_clock = settings.kubernetes, SystemAsyncClock()
    api = HttpApi(Access(Path(told.kubeconfig) if told.kubeconfig else None, clock=async_clock))
    cluster = ClusterSource(
        api,
        RegionSettings(told.region),
        clock=async_clock,
        random=Random(),  # noqa: S311 - it spreads retries
        namespace=told.namespace,
        node=told.node or socket.gethostname(),
        last_good=read_last_good(settings.state_dir),
        on_change=on_change,
    )
    return ClusterTold(stack.enter_context(FollowedCluster(cluster, api)), settings.state_dir), ()


def stay_responsive() -> None:
    """Let no thread wait long for another: a look at thousands of classes must not hold up a probe's answer.

    A full round of the garbage collector takes 60 ms with 5,000 tenants, and what is read makes no cycles.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    sys.setswitchinterval(0.001)


class _Signals:
    """Ends the agent in its own time, also for a signal that comes before there is one."""

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self._came = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._come)

    def are_for(self, agent: Agent) -> None:
        self._agent = agent
        if self._came:
            agent.stop()

    def wake(self, reason: str) -> None:
        """Let the agent look soon, when there is one: it looks first of all by itself."""
        if self._agent is not None:
            self._agent.wake(reason)

    def _come(self, *_: object) -> None:
        self._came = True
        if self._agent is not None:
            self._agent.stop()


def disable(
    node_file: NodeFile = _DEFAULT_MARKER,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for whoever finds it.")] = "",
) -> None:
    """Hold the agent off on this node, across restarts and redeploys. What the kernel has stays; see `uninstall`."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    write_marker(node_file, Disabled(reason=reason, who=f"{_user()}@{socket.gethostname()}", at=at))
    show.say(f"{node_file}: the agent keeps off until `kura-shaper enable`")


def enable(node_file: NodeFile = _DEFAULT_MARKER) -> None:
    """Let the agent work on this node again."""
    before = read_marker(node_file)
    if not remove_marker(node_file):
        show.say(f"{node_file}: the agent was not held off")
        return
    words = f", held off since {before.at} ({before.reason})" if before and before.at else ""
    show.say(f"{node_file}: removed{words}")


def _user() -> str:
    """Return who this is; in a debug pod the number may have no name, which must stop nobody."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"
