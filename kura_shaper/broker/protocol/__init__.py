"""Event bus v1 without any input or output: bytes and time in, events and bytes out, for both ends.

Nothing here knows of sockets, of HTTP/2 or of an event loop. The public names:

- `frames`: the frames as values, and `codes`, `limits`: what their fields may say;
- `codec`: `encode(frame)` and `FrameDecoder`, the same for both ends;
- `broker_session.BrokerSession` and `router_session.RouterSession`: the two ends of a
  session with the states of its streams;
- `buffer`: what waits for a router that does not read, counted to the byte;
- `reconnect`: how long to stay away after a session;
- `goaway`: HTTP/2 frames told apart, so that a GOAWAY does not end live streams;
- `schema`: JSON Schema of every frame.
"""
