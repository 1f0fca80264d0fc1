"""The event broker: the end of the event bus tunnel that lives in the cluster, and the protocol of both ends."""
