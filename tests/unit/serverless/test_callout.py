"""What a worker's identity allows."""

import pytest

from penstock.kit.errors import Invalid
from penstock.kit.nkeys import Issuer, new_account_seed
from penstock.serverless.callout import permissions, question

_WORKER = "unit-f-worker-0a1b2c3d"


def test_a_worker_may_do_exactly_this() -> None:
    rights = permissions("f", _WORKER)
    assert rights["pub"] == {
        "allow": [
            f"$JS.API.CONSUMER.MSG.NEXT.WORK.{_WORKER}",
            f"$JS.ACK.WORK.{_WORKER}.>",
            "runtime.serverless.result.f",
            "runtime.serverless.metrics.f",
            "runtime.serverless.output.f",
            f"runtime.serverless.call.f.{_WORKER}",
            "runtime.serverless.dlq.dispatch.f",
        ]
    }
    assert rights["sub"] == {
        "allow": [
            f"_INBOX_{_WORKER}.>",
            f"runtime.serverless.control.f.{_WORKER}",
            f"runtime.serverless.answer.f.{_WORKER}",
        ]
    }


def test_a_question_is_read_and_anything_else_is_refused() -> None:
    issuer = Issuer(new_account_seed())
    asked = {"server_id": {"id": "N1"}, "user_nkey": "U1", "connect_opts": {"user": "w", "pass": "p", "lang": "x"}}
    read = question(issuer.sign({"nats": asked}).encode())
    assert (read.user_nkey, read.connect_opts.user, read.connect_opts.password) == ("U1", "w", "p")
    for wrong in (None, {}, {**asked, "connect_opts": {"user": 1}}, {**asked, "user_nkey": 1}):
        with pytest.raises(Invalid):
            question(issuer.sign({"nats": wrong}).encode())
