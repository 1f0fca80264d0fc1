"""Workers of the demo: PUB sockets of libzmq that number their events as Dynamo's workers do, until the input ends.

workers.py ADDRESS PORT...       then one line of JSON: how many events each port has published
"""

from __future__ import annotations

import json
import select
import sys
import time

import msgspec
import zmq

from kura_shaper.broker.router.dynamo import Event, encode_event

TOPICS = ("kv-events", "kv_metrics")
_EVERY_S = 0.005


def main(address: str, ports: list[int]) -> int:
    """Publish on each port, a topic each time in turn."""
    context = zmq.Context()
    numbers = {port: dict.fromkeys(TOPICS, 0) for port in ports}
    sockets = {}
    for port in ports:
        sockets[port] = context.socket(zmq.PUB)
        sockets[port].setsockopt(zmq.SNDHWM, 100_000)
        sockets[port].bind(f"tcp://{address}:{port}")
    print(json.dumps({"ready": ports}), flush=True)
    while not select.select([sys.stdin], [], [], _EVERY_S)[0]:
        for port, socket in sockets.items():
            for topic in TOPICS:
                number = numbers[port][topic]
                payload = msgspec.msgpack.encode({"worker": port, "blocks": [number, number + 1]})
                event = Event(topic, port, number, time.time_ns() // 1_000_000, payload)
                socket.send_multipart(encode_event(event))
                numbers[port][topic] = number + 1
    time.sleep(0.5)  # what was sent last is to arrive before its socket goes
    print(json.dumps({"published": numbers}), flush=True)
    context.destroy(linger=0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], [int(port) for port in sys.argv[2:]]))
