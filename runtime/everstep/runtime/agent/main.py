"""`everstep-agent`: the container's main process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

import structlog

from everstep.runtime.agent import notices
from everstep.runtime.agent.channel import open_channel
from everstep.runtime.agent.events import NoticeArrived
from everstep.runtime.agent.supervisor.host import Host
from everstep.runtime.clock import SystemClock
from everstep.runtime.errors import ConfigurationError
from everstep.runtime.settings import AgentOptions, parse_options

EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the agent of one host until its controller says stop.

    Exit codes: 0 stopped as told, 2 bad command line, 70 the agent itself failed, 78 its port is
    taken, 143 left after a notice.
    """
    try:
        options = parse_options(sys.argv[1:] if arguments is None else arguments)
        code = asyncio.run(_run(options))
    except ConfigurationError as error:
        sys.stderr.write(f"everstep-agent: {error}\n")
        code = EXIT_USAGE
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that waits for storage that never answers must not keep the process.
    os._exit(code)


async def _run(options: AgentOptions) -> int:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    log = structlog.get_logger().bind(host=str(options.host))
    clock = SystemClock()
    host = Host(options, open_channel(options.channel, options.host, log), clock, log)

    def tell(name: str) -> None:
        now_s = clock.unix_s()
        host.feed(NoticeArrived(reason=name, deadline_s=now_s + options.grace_s, at_s=now_s))

    notices.listen(tell)
    return await host.run()


if __name__ == "__main__":
    main()
