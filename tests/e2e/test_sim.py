"""Simulated nodes from the command line, on the whole cloud."""

from e2e.cloud import Cloud


def _nodes(stack: Cloud) -> dict[str, tuple[str, str]]:
    listed = stack.json("node", "list")["items"]
    return {node["name"]: (node["id"], node["state"]) for node in listed if node["name"].startswith("sim-")}


def test_simulated_nodes_come_again_under_the_same_names_and_can_be_retired(stack: Cloud) -> None:
    try:
        first = stack.json("sim", "nodes", "3", "--gpus", "2", "--duration", "3")
        assert (first["nodes"], first["connected"]) == (3, 3)
        before = _nodes(stack)
        assert sorted(before) == ["sim-0001", "sim-0002", "sim-0003"]
        again = stack.json("sim", "nodes", "2", "--tunnels", "--duration", "3")
        assert (again["nodes"], again["connected"]) == (2, 2)
        assert {name: node_id for name, (node_id, _) in _nodes(stack).items()} == {
            name: node_id for name, (node_id, _) in before.items()
        }
    finally:
        stack.ok("sim", "nodes", "--cleanup")
    assert {state for _, state in _nodes(stack).values()} <= {"retired"}


def test_mistakes_are_named_and_nothing_is_enrolled(stack: Cloud) -> None:
    for arguments in (("0",), ("10001",), ("1", "--gpus", "-1"), ("1", "--task-ms", "-1")):
        done = stack.run("sim", "nodes", *arguments)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert _nodes(stack) == {} or {state for _, state in _nodes(stack).values()} == {"retired"}
