"""Every NATS subject, as functions. No subject is spelt anywhere else.

`evt.` carries facts, published by the relay alone. `hint.` carries "something changed, look": lossy, on core NATS.
`ask.` carries people's questions to other processes, and their answers; nothing is decided by them.
`runtime.serverless.` carries the work of functions, under the source's names.
"""

from typing import Final

ALL_EVENTS: Final = "evt.>"

#: The outbox has new rows: wakes the relay.
OUTBOX: Final = "hint.outbox"
#: Capacity came back: wakes whoever places waiting requests.
CAPACITY: Final = "hint.capacity"
#: Stock was handed over, or a floor changed: wakes whoever keeps the stock.
STOCK: Final = "hint.stock"
#: Requirements wait to be resolved: wakes whoever asks nodes to.
RESOLUTIONS: Final = "hint.resolutions"
#: Money came, or an event of a payment provider: wakes the biller.
BILLING: Final = "hint.billing"
#: Somebody has to give back what runs: wakes whoever releases it.
RELEASES: Final = "hint.releases"
#: A key, session or node was revoked: gateways look at once instead of at their next check.
REVOKED: Final = "hint.revoked"

#: Asked of the workers, which alone talk to Temporal: what an allocation's sagas did.
SAGA_HISTORY: Final = "ask.saga_history"

ALL_ALLOCATIONS: Final = "hint.allocation.*"
ALL_TASKS_DONE: Final = "hint.task.*"
ALL_NODES: Final = "hint.node.*"


def event(event_type: str) -> str:
    """Where facts of this type go."""
    return f"evt.{event_type}"


def allocation(allocation_id: str) -> str:
    """The allocation's row changed: its saga should look."""
    return f"hint.allocation.{allocation_id}"


def task_done(task_id: str) -> str:
    """The node task has a result."""
    return f"hint.task.{task_id}"


def node(node_id: str) -> str:
    """The node has tasks waiting, or its own row changed: the gateway that holds its link should look."""
    return f"hint.node.{node_id}"


def probe(stream: str) -> str:
    """Messages that nobody reads: whether the stream still stores."""
    return f"probe.{stream}"


def last_token(subject: str) -> str:
    """The id at the end of a hint's subject."""
    return subject.rpartition(".")[2]


#: An invocation waits for its turn, by function: wakes the activators.
FUNCTIONS: Final = "hint.functions"
#: What an invocation said, or that it ended: wakes those who follow it.
ALL_INVOCATIONS: Final = "hint.invocation.*"

SERVERLESS: Final = "runtime.serverless"
INVOKES: Final = f"{SERVERLESS}.invoke.*"
DISPATCHES: Final = f"{SERVERLESS}.dispatch.*.*"
RESULTS: Final = f"{SERVERLESS}.result.*"
METRICS: Final = f"{SERVERLESS}.metrics.*"
OUTPUTS: Final = f"{SERVERLESS}.output.*"
DEAD_LETTERS: Final = f"{SERVERLESS}.dlq.*.*"
CALLS: Final = f"{SERVERLESS}.call.*.*"
CONTROLS: Final = f"{SERVERLESS}.control.*.*"
CALL_ANSWERS: Final = f"{SERVERLESS}.answer.*.*"

#: The server asks here who connects.
AUTH_CALLOUT: Final = "$SYS.REQ.USER.AUTH"
#: A message was delivered as often as its consumer allows, and stays where it is.
MAX_DELIVERIES: Final = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>"


def invocation(invocation_id: str) -> str:
    """The invocation said something or ended."""
    return f"hint.invocation.{invocation_id}"


def request_token(project_id: str, function: str) -> str:
    """How a function is named in subjects."""
    return function if project_id == "prj_default" else f"{project_id}_{function}"


def invoke(request: str) -> str:
    """Ingress of a function; `request` is its `request_token`, here and below."""
    return f"{SERVERLESS}.invoke.{request}"


def dispatch(request: str, worker: str) -> str:
    """Attempts for one worker."""
    return f"{SERVERLESS}.dispatch.{request}.{worker}"


def result(request: str) -> str:
    """Ends of a function's attempts."""
    return f"{SERVERLESS}.result.{request}"


def metrics(request: str) -> str:
    """Reports about a function's workers."""
    return f"{SERVERLESS}.metrics.{request}"


def output(request: str) -> str:
    """What a function's handlers say."""
    return f"{SERVERLESS}.output.{request}"


def dead_letter(source: str, request: str) -> str:
    """What could not be done; `source` is invocation, dispatch, result or metric."""
    return f"{SERVERLESS}.dlq.{source}.{request}"


def call(request: str, worker: str) -> str:
    """Calls of one worker's handlers."""
    return f"{SERVERLESS}.call.{request}.{worker}"


def control(request: str, worker: str) -> str:
    """Orders to one worker's sidecar, on core NATS; answers to its calls come here too, below `.answer`."""
    return f"{SERVERLESS}.control.{request}.{worker}"


def call_answer(request: str, worker: str) -> str:
    """Answers to the calls of one worker's handlers."""
    return f"{SERVERLESS}.answer.{request}.{worker}"


def worker_inbox(worker: str) -> str:
    """The prefix of what one worker's connection may subscribe to for answers."""
    return f"_INBOX_{worker}"


def next_messages(stream: str, consumer: str) -> str:
    """Asks for a durable consumer's messages; `*` names them all, as an account exports it."""
    return f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"


def acks(stream: str, consumer: str = "") -> str:
    """Acknowledgements of a consumer's messages, or of all consumers'."""
    return f"$JS.ACK.{stream}.{consumer}.>" if consumer else f"$JS.ACK.{stream}.>"
