"""The reference router: the far end of the event bus, which decides what is subscribed and reads it.

- `service` admits clients and keeps what the settings want subscribed on the brokers that are there; `door` lets
  them in, `connection` answers their requests;
- `wanted`, `reread`: the subscriptions of the settings, and how they are changed while it runs;
- `rebalance`: asking every broker to come anew, in turn;
- `session`, `tunnel`: a client's session and one data stream, from this end;
- `http2`: a server's end of a connection;
- `feed`, `feed_stream`: a publisher's events, whatever brokers come and go;
- `zmtp`, `dynamo`, `sequences`: what comes out of a tunnel, as messages, as events, and what is missing among them;
- `output`, `serving`: events as lines, on stdout and for other programs;
- `port`: a tunnel as a local TCP port;
- `faults`: what it does wrong on purpose, for tests of brokers.
"""
