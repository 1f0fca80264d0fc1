"""balance: the budget follows demand over several shaped queues, until a signal."""

from __future__ import annotations

import logging
import signal
from typing import Annotated

import typer

from kura_shaper.cli import options
from kura_shaper.clock import SystemClock
from kura_shaper.kernel.balance import Balanced, BudgetBalancer
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.journal import Journal
from kura_shaper.kernel.links import read_device
from kura_shaper.log import event

_log = logging.getLogger(__name__)
_LEAVE = frozenset({signal.SIGTERM, signal.SIGINT})

Interval = Annotated[
    int, typer.Option("--interval", metavar="MS", min=20, help="Milliseconds from one step to the next.")
]
Duration = Annotated[
    float, typer.Option("--duration", metavar="S", min=0, help="Seconds to go on for; 0: until a signal.")
]


def register(app: typer.Typer) -> None:
    """Add this command."""
    epilog = "Example: kura-shaper --log-level info balance --device eth0 --budget 10G"
    app.command("balance", epilog=epilog)(balance)


def balance(
    device: options.DeviceName,
    budget: options.Budget,
    interval_ms: Interval = 100,
    duration_s: Duration = 0,
    state_dir: options.StateDirectory = options.DEFAULT_STATE,
) -> None:
    """Move the budget over several shaped queues, to where it is asked for.

    Only rates of classes change, which costs no packet, and the shares never add up to more than
    the budget. Stopping it leaves the last shares in force.
    """
    found = read_device(device)
    rate = options.rate_option("--budget", budget)
    clock = SystemClock()
    ends_at_ns = clock.now_ns() + int(duration_s * 1e9)
    # A signal ends the wait for the next step, and never a step.
    signal.pthread_sigmask(signal.SIG_BLOCK, _LEAVE)
    with TcClient() as client:
        balancer = BudgetBalancer(client, found, rate, clock=clock, locked=Journal(state_dir, found).locked)
        last = Balanced()
        while True:
            now = balancer.step()
            _tell(last, now)
            last = now
            if duration_s and clock.now_ns() >= ends_at_ns:
                return
            if signal.sigtimedwait(_LEAVE, interval_ms / 1_000):
                return


def _tell(before: Balanced, now: Balanced) -> None:
    if now.waits_for != before.waits_for:
        level = logging.WARNING if now.waits_for else logging.INFO
        event(_log, "budget_waits" if now.waits_for else "budget_follows", level=level, reason=now.waits_for)
    if now.moved:
        event(_log, "budget_moved", shares_bits_per_second=[share.bits_per_second for share in now.shares])
