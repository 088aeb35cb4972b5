"""Bounds of streams that tenants share, against what one function can put into them."""

from penstock.serverless import streams

#: Subjects of one function: kinds of messages, and sources of dead letters. Calls are of one worker.
KINDS = {
    streams.OUT: ["result", "metrics", "output"],
    streams.CALLS: ["call"],
    streams.DEAD: ["invocation", "dispatch", "result", "metric", "output", "call"],
}


def test_one_function_fills_less_than_half_of_a_stream() -> None:
    for config in streams.STREAMS:
        filled = len(KINDS.get(config.name or "", [])) * (config.max_msgs_per_subject or 0) * (config.max_msg_size or 0)
        assert 2 * filled <= (config.max_bytes or 0), config.name
