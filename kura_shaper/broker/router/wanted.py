"""Which publishers are wanted: a feed for each that is to be read, a port for each that is to be exposed.

The settings say which, and what is advertised where they have the router discover. Both can change while it runs.
What stays the same is not disturbed; what is not wanted any more ends. A publisher that both name is read once, as the
settings have it.
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from kura_shaper.broker.router.feed import Feed, FeedOwner
from kura_shaper.broker.router.port import LocalPort, PortOwner
from kura_shaper.broker.router.settings import SUBSCRIPTIONS_MAX, Subscription
from kura_shaper.errors import UsageError
from kura_shaper.log import event as log_event

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kura_shaper.broker.metadata import Publisher
    from kura_shaper.broker.protocol.codes import Role

_log = logging.getLogger("kura_shaper.broker.router")


class WantedOwner(FeedOwner, PortOwner, Protocol):
    """Who knows the sessions."""


class Wanted:
    """The feeds and the ports of the subscriptions of the settings, and the feeds of what was discovered.

    `beyond` is how many more were discovered than may be read.
    """

    def __init__(self, subscriptions: Sequence[Subscription], owner: WantedOwner) -> None:
        self._owner = owner
        self._of_settings = tuple(Feed(each, owner) for each in subscriptions if each.topics)
        self._discovered: dict[Publisher, Feed] = {}
        self._advertised: Mapping[Publisher, tuple[str, ...]] = {}
        self.beyond = 0
        self._without_broker: frozenset[tuple[Role, str]] = frozenset()
        self.ports = tuple(LocalPort(each, each.expose, owner) for each in subscriptions if each.expose)

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """Everything that is to be read."""
        return (*self._of_settings, *self._discovered.values())

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
        self._choose_discovered()

    def discover(self, advertised: Mapping[Publisher, tuple[str, ...]]) -> None:
        """Read these topics of these besides those of the settings, and nothing else that was discovered before."""
        self._advertised = advertised
        self._choose_discovered()

    def _choose_discovered(self) -> None:
        before, room = self._discovered, SUBSCRIPTIONS_MAX - len(self._of_settings)
        own = {(feed.wanted.endpoint, feed.wanted.dynamo_namespace) for feed in self._of_settings}
        found = {each: topics for each, topics in self._advertised.items() if each not in own}
        # Who is read stays, whoever else comes.
        kept = [each for each, feed in before.items() if found.get(each) == feed.wanted.topics][:room]
        stays = set(kept)
        new = list(islice((each for each in found if each not in stays), room - len(kept)))
        began = {each: Feed(Subscription(*each, found[each]), self._owner) for each in new}
        self._discovered = {each: before[each] for each in kept} | began
        ended = [feed for each, feed in before.items() if each not in stays]
        for feed in ended:
            feed.close()
        for feed in began.values():
            feed.place()
        if began or ended:
            log_event(_log, "publishers_discovered", read=len(self._discovered), began=len(began), ended=len(ended))
        self._note_beyond(len(found) - len(self._discovered))

    def _note_beyond(self, beyond: int) -> None:
        if beyond and not self.beyond:
            log_event(_log, "too_many_publishers", level=logging.WARNING, not_read=beyond)
        elif self.beyond and not beyond:
            log_event(_log, "all_publishers_read")
        self.beyond = beyond

    def look_for_brokers(self) -> None:
        """Say of which Dynamo namespaces something is wanted and nobody is there to ask for it, when that changes."""
        waiting = [feed.wanted for feed in self.feeds if feed.session is None]
        asked = {(each.role, each.dynamo_namespace) for each in (*waiting, *(port.wanted for port in self.ports))}
        without = frozenset(each for each in asked if self._owner.choose(each[1], role=each[0]) is None)
        for role, namespace in sorted(without - self._without_broker):
            log_event(_log, "no_broker", level=logging.WARNING, dynamo_namespace=namespace, role=role)
        for role, namespace in sorted(self._without_broker - without):
            log_event(_log, "broker_there_again", dynamo_namespace=namespace, role=role)
        self._without_broker = without

    def _change_feeds(self, subscriptions: Sequence[Subscription]) -> None:
        before = list(self._of_settings)
        after = []
        for wanted in subscriptions:
            same = next((feed for feed in before if feed.wanted.reads_like(wanted)), None)
            if same is None:
                after.append(Feed(wanted, self._owner))
            else:
                before.remove(same)
                after.append(same)
        self._of_settings = tuple(after)
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
