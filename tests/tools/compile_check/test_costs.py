import jax
import pytest
from jax.sharding import PartitionSpec

from tests.tools.compile_check.hlo_programs import compiled, floats, own, visited
from tools.compile_check import costs
from tools.compile_check.costs import Collective

EVERYONE, PARTS = PartitionSpec(), PartitionSpec(("rows", "columns"))
BOTH = ("rows", "columns")


def messages(function, out=PARTS, sizes=(64, 128)):
    return costs.collectives(compiled(own(function, out), floats(*sizes)), 8)


def test_a_sum_over_devices_in_a_scan_counts_once_for_each_turn():
    def five(x):
        return jax.lax.scan(lambda sum, _: (jax.lax.psum(sum, BOTH) * 0.5 + x, None), x, length=5)[
            0
        ]

    (message,) = messages(five, sizes=(8, 1000))
    assert message == Collective("all-reduce", 8, 5, 5 * 4000)
    assert message.sent == 2 * 7 / 8 * 5 * 4000


RING = [(i, (i + 1) % 4) for i in range(4)]


# Each device has 8 × 128 numbers of 4 bytes; what a message holds is the whole array of its group.
@pytest.mark.parametrize(
    ("function", "out", "kind", "group", "arrays"),
    [
        (lambda x: jax.lax.psum(x, "columns"), PartitionSpec("rows"), "all-reduce", 4, 1),
        (lambda x: jax.lax.all_gather(x, BOTH), EVERYONE, "all-gather", 8, 8),
        (lambda x: jax.lax.all_gather(x, "columns"), PARTS, "all-gather", 4, 4),
        (lambda x: jax.lax.psum_scatter(x, BOTH), PARTS, "reduce-scatter", 8, 1),
        (lambda x: jax.lax.all_to_all(x, BOTH, 0, 0), PARTS, "all-to-all", 8, 1),
        (lambda x: jax.lax.ppermute(x, "columns", RING), PARTS, "collective-permute", 8, 1),
    ],
)
def test_every_kind_of_message_counts_its_bytes_and_its_group(function, out, kind, group, arrays):
    assert messages(function, out) == [Collective(kind, group, 1, arrays * 4096)]


def test_a_ring_of_four_sends_three_quarters_and_twice_that_for_a_sum():
    sent = {"all-reduce": 1500, "collective-permute": 1000}
    for kind in costs.KINDS:
        assert Collective(kind, 4, 1, 1000).sent == sent.get(kind, 750)


def one(attributes, opcode="all-reduce", shape="f32[100]"):
    text = f"""HloModule one

ENTRY %main (x: {shape}) -> {shape} {{
  %x = {shape} parameter(0)
  ROOT %y = {shape} {opcode}(%x), {attributes}
}}
"""
    return visited(text)


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups={{0,1},{2,3}}", 2),
        ("replica_groups=[4,8]<=[32]", 8),
        ("replica_groups=[2,16]<=[4,8]T(1,0)", 16),
        ("replica_groups=mesh['data'=4,'tensor'=2] {'tensor'}", 2),
        ("replica_groups=mesh['data'=4,'tensor'=2] {'data','tensor'}", 8),
        ("replica_groups=mesh['axis_0'=16] {'axis_0':(1)4}", 4),
        ("replica_groups={}", 32),
    ],
)
def test_the_group_is_read_from_every_way_to_write_it(groups, size):
    assert costs.collectives(one(groups), 32) == [Collective("all-reduce", size, 1, 400)]


def test_the_two_halves_of_a_message_count_once():
    text = """HloModule halves

ENTRY %main (x: f32[100]) -> f32[400] {
  %x = f32[100] parameter(0)
  %s = (f32[100], f32[400]) all-gather-start(%x), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %d = f32[400] all-gather-done(%s)
}
"""
    assert costs.collectives(visited(text), 4) == [Collective("all-gather", 4, 1, 1600)]


def test_a_message_that_stands_in_several_fusions_counts_once():
    text = """HloModule parts

%part.1 (x: f32[100]) -> f32[400] {
  %x = f32[100] parameter(0)
  ROOT %g = f32[400] all-gather(%x), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}
}

%part.2 (x: f32[100]) -> f32[400] {
  %x = f32[100] parameter(0)
  ROOT %g = f32[400] all-gather(%x), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}
}

ENTRY %main (x: f32[100]) -> f32[400] {
  %x = f32[100] parameter(0)
  %a = f32[400] fusion(%x), kind=kCustom, calls=%part.1
  ROOT %b = f32[400] fusion(%x), kind=kCustom, calls=%part.2
}
"""
    assert costs.collectives(visited(text), 4) == [Collective("all-gather", 4, 1, 1600)]


def test_a_message_with_parts_in_a_loop_counts_as_often_as_it_starts():
    text = """HloModule parts

%start (x: f32[100]) -> f32[400] {
  %x = f32[100] parameter(0)
  %g = f32[400] all-gather(%x), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %c = f32[400] custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%part (x: f32[100]) -> f32[400] {
  %x = f32[100] parameter(0)
  ROOT %g = f32[400] all-gather(%x), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}
}

%other (x: f32[100]) -> f32[400] {
  %x = f32[100] parameter(0)
  ROOT %g = f32[400] all-gather(%x), channel_id=8, replica_groups=[1,4]<=[4], dimensions={0}
}

%end (x: f32[100]) -> f32[400] {
  %x = f32[100] parameter(0)
  %g = f32[400] all-gather(%x), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %c = f32[400] custom-call(%x, %g), custom_call_target="AsyncCollectiveDone"
}

%body (t: f32[100]) -> f32[100] {
  %t = f32[100] parameter(0)
  %p = f32[400] fusion(%t), kind=kOutput, calls=%part
  %o = f32[400] fusion(%t), kind=kOutput, calls=%other
  ROOT %s = f32[100] slice(%p), slice={[0:100]}
}

%condition (t: f32[100]) -> pred[] {
  %t = f32[100] parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (x: f32[100]) -> f32[400] {
  %x = f32[100] parameter(0)
  FIRST
  %w = f32[100] while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %d = f32[400] fusion(%w), kind=kCustom, calls=%end
}
"""
    start = "%s = f32[400] fusion(%x), kind=kCustom, calls=%start"
    # Six of 4 · 400 bytes: one around the loop, another in each of its turns.
    whole, end = text.replace("FIRST", start), "fusion(%w), kind=kCustom, calls=%end"
    for program in (
        whole,
        text.replace("FIRST", ""),
        whole.replace(end, "broadcast(%w), dimensions={}"),
    ):
        assert costs.collectives(visited(program), 4) == [Collective("all-gather", 4, 6, 6 * 1600)]


SCATTERS = """HloModule scatters

%all-reduce-scatter.1 (x: f32[400]) -> f32[100] {
  %x = f32[400] parameter(0)
  %i = u32[] partition-id()
  %r = f32[400] all-reduce(%x), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%add
  ROOT %d = f32[100] dynamic-slice(%r, %i), dynamic_slice_sizes={100}
}

%all-reduce-scatter.2 (x: f32[400], y: f32[400]) -> (f32[100], f32[100]) {
  %x = f32[400] parameter(0)
  %y = f32[400] parameter(1)
  %i = u32[] partition-id()
  %r = (f32[400], f32[400]) all-reduce(%x, %y), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%add
  %g = f32[400] get-tuple-element(%r), index=0
  %h = f32[400] get-tuple-element(%r), index=1
  %d = f32[100] dynamic-slice(%g, %i), dynamic_slice_sizes={100}
  %e = f32[100] dynamic-slice(%h, %i), dynamic_slice_sizes={100}
  ROOT %t = (f32[100], f32[100]) tuple(%d, %e)
}

ENTRY %main (x: f32[400], y: f32[400]) -> f32[100] {
  %x = f32[400] parameter(0)
  %y = f32[400] parameter(1)
  %a = (f32[100], f32[100]) fusion(%x, %y), kind=kCustom, calls=%all-reduce-scatter.2
  ROOT %b = f32[100] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_a_sum_of_which_each_device_keeps_a_slice_is_a_reduce_scatter():
    # Messages that were joined all have the same channel.
    (message,) = costs.collectives(visited(SCATTERS), 4)
    assert message == Collective("reduce-scatter", 4, 2, 3 * 1600)
    assert message.sent == 3 / 4 * 3 * 1600


SLICE = "ROOT %d = f32[100] dynamic-slice(%r, %i), dynamic_slice_sizes={100}"
TUPLE = "ROOT %t = (f32[100], f32[100]) tuple(%d, %e)"


@pytest.mark.parametrize(
    ("change", "to"),
    [
        (TUPLE, "ROOT %t = (f32[100], f32[400]) tuple(%d, %h)"),
        (SLICE, "ROOT %d = f32[400] negate(%r)"),
        (SLICE, "ROOT %d = f32[400] get-tuple-element(%x), index=0"),
    ],
)
def test_a_sum_that_is_kept_whole_is_none(change, to):
    assert change in SCATTERS
    all_messages = costs.collectives(visited(SCATTERS.replace(change, to)), 4)
    assert [message.kind for message in all_messages] == ["all-reduce", "reduce-scatter"]


def test_cycles_count_for_each_turn_and_what_has_none_is_named():
    text = """HloModule cycles

%fused (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  ROOT %y = f32[8] sine(%x), backend_config={"window_config":{"estimated_cycles":"1000"}}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %a = f32[8] fusion(%x), kind=kLoop, calls=%fused, backend_config={"window_config":{"estimated_cycles":"70"}}
  %b = f32[8] negate(%a), backend_config={"window_config":{"estimated_cycles":"5"}}
  ROOT %gather_fusion.3 = f32[8] fusion(%b), kind=kCustom, calls=%fused
}
"""
    cycles = costs.estimated_cycles(visited(text))
    assert cycles == (75, {"gather_fusion": 1})
