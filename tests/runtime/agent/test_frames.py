"""Frames over a socket: whole, in order, with their descriptors, from either side."""

from __future__ import annotations

import asyncio
import os
import socket

import msgspec
import pytest

from everstep.controller.api.ids import Step
from everstep.runtime.agent.control import ControlBlock, create_control_file
from everstep.runtime.agent.frames import FrameStream, LinkClosed, receive, send
from everstep.runtime.agent.link import (
    METRICS_RING_SLOTS,
    AgentFrame,
    Captured,
    MetricNames,
    SlotsGranted,
    SlotsRefused,
    Word,
    WorkerFrame,
)


def test_frames_arrive_whole_and_in_order_with_their_descriptors() -> None:
    left, right = socket.socketpair()
    with left, right:
        fds = [os.memfd_create(f"slot-{n}") for n in range(3)]
        send(left, SlotsGranted(count=3, size_bytes=64), fds)
        send(left, SlotsRefused(message="é" * 1000))
        granted, received = receive(right, AgentFrame, 3)
        refused, none = receive(right, AgentFrame, 3)
    assert granted == SlotsGranted(count=3, size_bytes=64)
    assert [os.fstat(fd).st_ino for fd in received] == [os.fstat(fd).st_ino for fd in fds]
    assert refused == SlotsRefused(message="é" * 1000)
    assert none == []
    for fd in (*fds, *received):
        os.close(fd)


def test_an_ended_side_is_told_to_reader_and_writer() -> None:
    left, right = socket.socketpair()
    right.close()
    with left, pytest.raises(LinkClosed):
        send(left, SlotsRefused(message="x"))
    left, right = socket.socketpair()
    left.sendall(b"\x10\x00\x00\x00{")
    left.close()
    with right, pytest.raises(LinkClosed):
        receive(right, AgentFrame)


def test_the_stream_returns_what_was_sent_before_the_end() -> None:
    async def scenario() -> list[msgspec.Struct]:
        left, right = socket.socketpair()
        stream: FrameStream[WorkerFrame] = FrameStream(right, WorkerFrame)
        with left:
            for step in range(3):
                send(left, Captured(slot=step, step=Step(step), copy_s=0.1))
        found: list[msgspec.Struct] = [await stream.receive() for _ in range(3)]
        with pytest.raises(LinkClosed):
            await stream.receive()
        stream.close()
        return found

    assert [frame.step for frame in asyncio.run(scenario()) if isinstance(frame, Captured)] == [
        0,
        1,
        2,
    ]


def test_a_stream_whose_descriptor_somebody_else_holds_can_be_finished() -> None:
    async def scenario() -> None:
        left, right = socket.socketpair()
        held_by_a_fork = os.dup(left.fileno())
        stream: FrameStream[WorkerFrame] = FrameStream(right, WorkerFrame)
        send(left, MetricNames(names=("loss",)))
        left.close()
        stream.finish()
        assert await stream.receive() == MetricNames(names=("loss",))
        with pytest.raises(LinkClosed):
            await stream.receive()
        stream.close()
        os.close(held_by_a_fork)

    asyncio.run(scenario())


def test_a_stream_of_garbage_is_as_good_as_closed() -> None:
    async def scenario() -> None:
        left, right = socket.socketpair()
        stream: FrameStream[WorkerFrame] = FrameStream(right, WorkerFrame)
        with left:
            left.sendall((7).to_bytes(4, "little") + b"garbage")
            with pytest.raises(LinkClosed):
                await stream.receive()
        stream.close()

    asyncio.run(scenario())


def test_a_large_frame_passes_a_small_buffer_in_both_directions() -> None:
    names = tuple(f"metric-{n}" for n in range(200_000))

    async def scenario() -> tuple[str, ...]:
        left, right = socket.socketpair()
        ours: FrameStream[WorkerFrame] = FrameStream(left, WorkerFrame)
        theirs: FrameStream[WorkerFrame] = FrameStream(right, WorkerFrame)
        sending = asyncio.create_task(ours.send(MetricNames(names=names)))
        frame = await theirs.receive()
        await sending
        ours.close()
        theirs.close()
        assert isinstance(frame, MetricNames)
        return frame.names

    assert asyncio.run(scenario()) == names


def test_two_mappings_share_the_words_and_the_ring() -> None:
    fd = create_control_file()
    agent, worker = ControlBlock(fd), ControlBlock(fd)
    os.close(fd)
    assert agent.read(Word.STEP_DONE) == -1
    assert agent.read(Word.SLOT_GRANTED) == -1
    worker.write(Word.STEP_DONE, 1 << 40)
    assert agent.read(Word.STEP_DONE) == 1 << 40
    worker.record(1, (0.5, -0.0))
    worker.record(2, (0.25, 2.0))
    assert list(agent.entries(0)) == [(1, (0.5, -0.0)), (2, (0.25, 2.0))]
    assert list(agent.entries(agent.head)) == []
    for step in range(3, METRICS_RING_SLOTS + 5):
        worker.record(step, (float(step), 0.0))
    steps = [step for step, _ in agent.entries(2)]
    assert steps == list(range(5, METRICS_RING_SLOTS + 5))
    agent.close()
    worker.close()
