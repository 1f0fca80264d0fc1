"""What leaves a device of the lab, by the device's own byte counters."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING, Any

from pyroute2.ethtool.ioctl import EthtoolError, IoctlEthtool

from kura_shaper.errors import RefusedError, StateUnknownError
from kura_shaper.lab.isolation import inside

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class DeviceBytes:
    """A source: `<device>.tx` and `<device>.rx` of devices of one namespace, in bytes of layer 2.

    One RTM_GETSTATS per device and reading, some 10 microseconds: no text, no other attributes.
    """

    _REQUEST = struct.Struct("=IHHII BBHII")
    _HEADER = struct.Struct("=IHHII")
    _RTM_NEWSTATS, _RTM_GETSTATS, _NLMSG_ERROR, _NLM_F_REQUEST, _FILTER_LINK_64 = 92, 94, 2, 1, 1
    # nlmsghdr 16, if_stats_msg 12, rtattr 4; then rx packets, tx packets, rx bytes, tx bytes.
    _BYTES = struct.Struct("=32x 16x QQ")

    def __init__(self, namespace: Path, devices: Sequence[str]) -> None:
        """Raises RefusedError when the namespace is not there, StateUnknownError when a device is not."""
        with inside(namespace):
            try:
                self._indexes = {device: socket.if_nametoindex(device) for device in devices}
            except OSError as error:
                raise StateUnknownError(f"no device of {', '.join(devices)} in {namespace.name}: {error}") from error
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.settimeout(1.0)

    def __call__(self) -> dict[str, int]:
        """Return the counters. Raises StateUnknownError when a device is gone."""
        counters = {}
        for device, index in self._indexes.items():
            counters[f"{device}.rx"], counters[f"{device}.tx"] = self._rx_and_tx_bytes(device, index)
        return counters

    def _rx_and_tx_bytes(self, device: str, index: int) -> tuple[int, int]:
        size, request = self._REQUEST.size, self._RTM_GETSTATS
        try:
            self._socket.send(
                self._REQUEST.pack(size, request, self._NLM_F_REQUEST, 0, 0, 0, 0, 0, index, self._FILTER_LINK_64)
            )
            reply = self._socket.recv(4_096)
        except OSError as error:
            raise StateUnknownError(f"the counters of {device} could not be read: {error}") from error
        if self._HEADER.unpack_from(reply)[1] != self._RTM_NEWSTATS:
            raise StateUnknownError(f"the counters of {device} could not be read", remedy="is the device gone?")
        rx_bytes, tx_bytes = self._BYTES.unpack_from(reply)
        return rx_bytes, tx_bytes

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def count_wire_bytes(namespace: Path, device: str) -> None:
    """Make a device hand over single segments, so that its counters count the bytes of the wire.

    With offloads on, a veth counts 64 kB as one packet with one header. Every feature that
    cuts segments below the counter is turned off by ethtool's ioctl, and read back.
    Raises RefusedError when one stays on.
    """
    with inside(namespace):
        door: Any = IoctlEthtool(device)
        try:
            features: Any = door.get_features()
            for name in _active_cutters(features):
                features[name] = False
            door.set_features(features)
            left = _active_cutters(door.get_features())
        except (OSError, EthtoolError) as error:
            raise RefusedError(f"the offloads of {device} could not be turned off: {error}") from error
        finally:
            door.close()
    if left:
        raise RefusedError(f"{device} keeps {', '.join(left)} on, so its counters would miss headers")


def _active_cutters(features: Any) -> tuple[str, ...]:
    return tuple(name for name, is_active, *_ in features if is_active and _cuts_segments(name))


def _cuts_segments(feature: str) -> bool:
    return feature.startswith("tx-") and (feature.endswith("-segmentation") or "-gso-" in feature)
