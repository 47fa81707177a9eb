"""One of two processes that serve nothing: `python processes_alone.py HOST:PORT NUMBER`.

The first waits until it is asked to end, the second follows it.
"""

import sys
import threading

from dasc_jax.engine.peers import Followers, Leader
from dasc_jax.programs.processes import asked_to_leave, joined


def main(coordinator: str, number: int) -> None:
    with joined(coordinator, 2, number) as peers:
        if isinstance(peers, Followers):
            lead(peers)
        elif isinstance(peers, Leader):
            with asked_to_leave(peers):
                peers.built({})
                print("ready", flush=True)
                assert peers.next() == ("stop",)


def lead(followers: Followers) -> None:
    followers.await_built({})
    ended, lost = threading.Event(), []

    def lose(error: Exception) -> None:
        lost.append(error)
        ended.set()

    followers.watch(lose=lose, leave=ended.set)
    print("ready", flush=True)
    ended.wait()
    if lost:
        raise lost[0]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
