"""What the settings want of publishers: a feed for each that is to be read, a port for each that is to be exposed.

It can be changed while it runs. What stays the same is not disturbed; what is not wanted any more ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kura_shaper.broker.router.feed import Feed, FeedOwner
from kura_shaper.broker.router.port import LocalPort, PortOwner
from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kura_shaper.broker.router.settings import Subscription


class WantedOwner(FeedOwner, PortOwner, Protocol):
    """Who knows the sessions."""


class Wanted:
    """The feeds and the ports of the subscriptions of the settings."""

    def __init__(self, subscriptions: Sequence[Subscription], owner: WantedOwner) -> None:
        self._owner = owner
        self.feeds = tuple(Feed(each, owner) for each in subscriptions if each.topics)
        self.ports = tuple(LocalPort(each, each.expose, owner) for each in subscriptions if each.expose)

    async def start(self) -> None:
        """Have the ports listen. Raises UsageError when an address can't be had."""
        for port in self.ports:
            await port.start()

    async def change(self, subscriptions: Sequence[Subscription]) -> None:
        """Want these from now on. Raises UsageError when an address can't be had, and then nothing is changed."""
        ports = {each.listen: each for each in self.ports}
        exposed = {each.expose: each for each in subscriptions if each.expose}
        added = [LocalPort(each, at, self._owner) for at, each in exposed.items() if at not in ports]
        try:
            for port in added:
                await port.start()
        except UsageError:
            for port in added:
                port.close()
            raise
        for at, port in ports.items():
            if at in exposed:
                port.want(exposed[at])
            else:
                port.close()
        self.ports = (*(port for at, port in ports.items() if at in exposed), *added)
        self._change_feeds([each for each in subscriptions if each.topics])

    def _change_feeds(self, subscriptions: Sequence[Subscription]) -> None:
        before = list(self.feeds)
        after = []
        for wanted in subscriptions:
            same = next((feed for feed in before if feed.wanted.reads_like(wanted)), None)
            if same is None:
                after.append(Feed(wanted, self._owner))
            else:
                before.remove(same)
                after.append(same)
        self.feeds = tuple(after)
        for gone in before:
            gone.close()
            for feed in after:
                # Other topics of the same publisher: what is missed while they are subscribed to shows as a gap.
                if feed.current is None and feed.wanted.target == gone.wanted.target:
                    feed.sequences = gone.sequences
        for feed in after:
            feed.place()

    def stop(self) -> None:
        """Take no further connections, and read nothing more."""
        for port in self.ports:
            port.stop()
        for feed in self.feeds:
            feed.close()

    def close(self) -> None:
        """End everything."""
        self.stop()
        for port in self.ports:
            port.close()
