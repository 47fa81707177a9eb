"""Several processes of one program: how they find each other, and how all of them end."""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from dasc_jax.config import ConfigError
from dasc_jax.engine.peers import Followers, Leader, connect
from dasc_jax.parallel import make_mesh
from dasc_jax.programs.runtime import FAILED, ProgramError, complain, complaints

SHUTDOWN_SECONDS = 10
"""How long the coordinator waits at the end until every process has come to its own."""


def check_processes(coordinator: str | None, processes: int, process_id: int) -> None:
    """Refuse a place among processes that does not exist.

    Raises:
        ConfigError: with the numbers.
    """
    if processes < 1 or not 0 <= process_id < processes:
        raise ConfigError(f"process-id is {process_id} of {processes} processes: 0..N-1 of N >= 1")
    if (coordinator is not None) != (processes > 1):
        raise ConfigError(
            f"coordinator is {coordinator} for {processes} processes; several need it"
        )
    host, _, port = (coordinator or "localhost:0").rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise ConfigError(f"coordinator is {coordinator!r}; it must be HOST:PORT")


@contextlib.contextmanager
def joined(
    coordinator: str | None, processes: int, process_id: int
) -> Iterator[Followers | Leader | None]:
    """Join the other processes; None where there is one only. To be called before JAX is used.

    Process 0 tells the others to end behind the block. A process that fails, or learns that another
    one is gone, ends at once with status 1, wherever it is.
    """
    if coordinator is None:
        yield None
        return
    peers = None
    try:
        with complaints():
            # Its handler would take SIGTERM from ours.
            jax.config.update("jax_enable_preemption_service", False)
            jax.distributed.initialize(
                coordinator, processes, process_id, shutdown_timeout_seconds=SHUTDOWN_SECONDS
            )
            peers = connect(coordinator, _lost)
        yield peers
    except KeyboardInterrupt:
        if isinstance(peers, Followers) and peers.serving and not peers.lost_within(0.0):
            peers.close()
            raise
        complain("interrupted")
        _end()
    except BaseException as error:
        if not isinstance(error, ProgramError):
            traceback.print_exc()
        if isinstance(peers, Leader):
            cause = error.__cause__ or error
            peers.failed(f"{type(cause).__name__}: {cause}")
        _end()
    else:
        if isinstance(peers, Followers):
            peers.close()


def _lost(lost: Exception) -> None:
    complain(str(lost))
    _end()


def _end() -> None:
    """Leave without JAX's own end, which would wait for processes that will not come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FAILED)


@contextlib.contextmanager
def asked_to_leave(leader: Leader) -> Iterator[None]:
    """Let SIGINT and SIGTERM, the first time, ask process 0 to end the server."""

    def leave(number: int, frame: object) -> None:
        leader.leave()
        for each in handled:
            signal.signal(each, signal.SIG_DFL)

    handled = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, leave) for each in handled]
    try:
        yield
    finally:
        for each, handler in zip(handled, before, strict=True):
            signal.signal(each, handler)


def rank_mesh(tp: int) -> Mesh | None:
    """A mesh of `tp` ranks, as many on every process; None for one rank.

    Raises:
        ConfigError: the processes cannot share them alike, or one has too few devices.
    """
    if tp == 1:
        return None
    processes = range(jax.process_count())
    each, rest = divmod(tp, len(processes))
    if tp < 1:
        raise ConfigError(f"tp={tp} must be at least 1")
    if rest:
        raise ConfigError(f"tp={tp} is no multiple of {len(processes)} processes")
    devices = [[d for d in jax.devices() if d.process_index == at] for at in processes]
    for at, own in enumerate(devices):
        if len(own) < each:
            raise ConfigError(
                f"tp={tp} takes {each} devices a process; process {at} has {len(own)}"
            )
    return make_mesh(tp, [device for own in devices for device in own[:each]])
