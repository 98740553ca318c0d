"""Plans that are written down: what explain prints is honoured, changed by hand too, and mistakes are named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import models
import pytest
import torch
from fsdp_compile.passes.pipeline import Plan
from fsdp_compile.passes.schedule import SchedulePlan
from fsdp_compile.passes.written import Written, read
from graphs import assert_same, capture, chain, plan_of, reference, train
from parity import Case, check
from torch import Tensor, nn

from fsdp_compile import explain
from fsdp_compile.options import parse
from fsdp_compile.report import Report

HAND: dict[str, Any] = {
    "forward": {"gather": [["a.weight", "a.bias"], ["b.weight", "b.bias"]], "prefetch": [0, 1]},
    "backward": {"reduce": [["b.weight"], ["a.weight", "a.bias"]], "prefetch": 0},
    "keep": ["b.weight"],
}


def report(**options: Any) -> Report:
    return explain(models.mlp(), models.vector_batch(0)[0], world_size=2, lowering="fx", **options)


def members(r: Report, direction: str, gathers: bool) -> list[set[str]]:
    return [set(b.parameters) for b in r.buckets if b.direction == direction and (b.kind == "all_gather") == gathers]


def test_a_plan_by_hand_is_honoured(tmp_path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(HAND))
    for plan in (HAND, str(file), file):
        got = report(plan=plan, bucket_bytes=0)
        assert members(got, "forward", True)[:2] == [{"a.weight", "a.bias"}, {"b.weight", "b.bias"}]
        assert {"b.weight"} in members(got, "backward", False)
        assert {"a.weight", "a.bias"} in members(got, "backward", False)
        assert got.kept == {"b.weight"} and not any("b.weight" in m for m in members(got, "backward", True))


def test_what_explain_prints_is_the_plan() -> None:
    first = report(bucket_bytes=300, prefetch=1, keep_bytes=400)
    again = report(plan=json.loads(json.dumps(first.plan)), bucket_bytes=1 << 30)
    assert first.plan == again.plan
    assert [(b.direction, b.kind, b.parameters, b.launch, b.wait) for b in first.buckets] == [
        (b.direction, b.kind, b.parameters, b.launch, b.wait) for b in again.buckets
    ]
    assert first.to_dict()["plan"] == first.plan


def test_what_a_plan_said_is_written_down_again() -> None:
    plan = {**HAND, "limit_all_gathers": 9000}
    got = report(plan=plan)
    assert got.limit_gathers == got.plan["limit_all_gathers"] == 9000
    assert (got.plan["forward"]["prefetch"], got.plan["backward"]["prefetch"], got.plan["keep"]) == ([0, 1], 0, ["b.weight"])
    assert report(plan=got.plan).plan == got.plan


def test_prefetch_for_each_bucket() -> None:
    plan = SchedulePlan((3, 0, 1))
    assert [plan.distance(i) for i in range(5)] == [3, 0, 1, 1, 1]
    for bad in ((), (1, -1), -1):
        with pytest.raises(ValueError, match="prefetch must not be negative"):
            SchedulePlan(bad)


@pytest.mark.parametrize("prefetch", [(0,), (2, 0), (0, 3), (1, 1, 0)])
def test_numbers_stay_right(prefetch: tuple[int, ...]) -> None:
    program = chain(5, per_layer=2)
    plan = plan_of(0)
    assert_same(train(program, Plan(plan.bucket, SchedulePlan(prefetch)), capture(program)), reference(program))


def test_applied_to_one_direction() -> None:
    base = plan_of(100, prefetch=2)
    written = read(HAND)
    forward, backward = written.applied(base, "forward"), written.applied(base, "backward")
    assert forward.schedule.prefetch == (0, 1) and backward.schedule.prefetch == (0,)
    assert forward.bucket.label_of["a.weight"] == forward.bucket.label_of["a.bias"] != forward.bucket.label_of["b.bias"]
    assert backward.bucket.label_of == {} and backward.bucket.reduce_label_of is not None
    assert backward.bucket.reduce_label_of["b.weight"] != backward.bucket.reduce_label_of["a.bias"]
    assert Written().applied(base, "forward").schedule == base.schedule


BAD: dict[str, tuple[Mapping[str, Any], str]] = {
    "part": ({"forwards": {}}, "plan: unknown part 'forwards'; there are: forward, backward, keep"),
    "inner part": ({"forward": {"reduce": []}}, "plan, forward: unknown part 'reduce'; there are: gather, prefetch"),
    "no object": ({"forward": []}, "plan, forward: an object with gather, prefetch is expected"),
    "no buckets": ({"forward": {"gather": "a"}}, "plan, forward gather: a list of buckets"),
    "no names": ({"forward": {"gather": ["a"]}}, "plan, forward gather, bucket 1: a list of FQNs"),
    "twice": ({"forward": {"gather": [["a"], ["b", "a"]]}}, "'a' is in two buckets, number 1 and number 2"),
    "in one bucket": ({"forward": {"gather": [["a", "a"]]}}, "'a' is twice in one bucket"),
    "empty bucket": ({"backward": {"reduce": [["a"], []]}}, "option plan, backward reduce: bucket 2 is empty"),
    "prefetch": ({"backward": {"prefetch": [1, -1]}}, "plan, backward prefetch: whole numbers from 0 on"),
    "no prefetch": ({"backward": {"prefetch": []}}, "at least one"),
    "keep": ({"keep": "a"}, "plan, keep: a list of FQNs"),
}


@pytest.mark.parametrize("what", BAD)
def test_mistakes_are_named(what: str) -> None:
    plan, message = BAD[what]
    with pytest.raises(ValueError) as e:
        parse({"plan": plan})
    assert message in str(e.value)


def test_mistakes_in_a_file_and_in_names(tmp_path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("{")
    with pytest.raises(ValueError, match=r"option plan: .*plan\.json is not JSON"):
        parse({"plan": file})
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    for name, said in (("none.json", "No such file"), ("", "Is a directory"), ("binary.json", "is not JSON")):
        with pytest.raises(ValueError, match=f"option plan: .*{said}"):
            parse({"plan": str(tmp_path / name)})
    with pytest.raises(TypeError, match="option plan must be 'auto', 'fixed', a dict or the name of a JSON file, got 3"):
        parse({"plan": 3})
    with pytest.raises(ValueError, match=r"has no parameter 'a\.wight'; did you mean 'a\.weight'"):
        report(plan={"keep": ["a.wight"]})


LIMIT = {"limit_all_gathers": 9000}


@pytest.mark.parametrize(
    "plan, options, message",
    [
        (LIMIT, LIMIT, "options limit_all_gathers and plan both decide this"),
        (LIMIT, {"collective": "packed"}, "option plan: limit_all_gathers and collective='packed' exclude each other"),
        (HAND, {"prefetch": 5}, "options prefetch and plan both"),
        (HAND, {"keep_bytes": 5}, "options keep_bytes and plan both"),
        (HAND, {"bucket_modules": ("Linear",)}, "options bucket_modules and plan both"),
    ],
)
def test_nothing_is_said_twice(plan: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse({"plan": plan, **options})


class Tied(nn.Module):
    """``b`` is ``a``'s weight under another name and has no bias; ``unused`` is in no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


def test_names_that_stand_for_no_parameter_of_their_own() -> None:
    for name in ("b.weight", "b.bias", "b"):
        with pytest.raises(ValueError, match=f"the model has no parameter '{name}'.*known by its first name"):
            explain(Tied(), torch.zeros(2, 4), lowering="fx", plan={"keep": [name]})


def test_kept_is_what_is_kept() -> None:
    plan = {"keep": ["a.weight", "unused.weight"]}
    assert explain(Tied(), torch.zeros(2, 4), lowering="fx", plan=plan).kept == {"a.weight"}
    with torch.no_grad():
        assert explain(Tied(), torch.zeros(2, 4), lowering="fx", plan=plan).kept == frozenset()


def test_what_is_kept_is_blamed_for_a_limit() -> None:
    with pytest.raises(Exception, match="or keep fewer weights for backward"):
        report(keep_bytes=1 << 20, limit_all_gathers=800, bucket_bytes=0)


@pytest.mark.parametrize("options", [{"plan": HAND}, {"keep_bytes": 1 << 20}], ids=["plan", "keep_bytes"])
@pytest.mark.parametrize("world", [2, 3])
def test_numbers_of_a_training(pool, world: int, options: dict[str, Any]) -> None:
    check(pool, Case(models.mlp, models.vector_batch, models.square_loss), world=world, options=options)
