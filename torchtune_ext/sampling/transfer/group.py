"""Several servers as one receiver of weights: the client that the trainer side of vLLM's weight transfer talks to."""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from torchtune_ext.sampling.doors import authorization

ADAPTER_NAME = "policy"  # by which requests ask a server for the adapter
ADAPTER_PATH = "/nowhere/the-adapter-is-in-memory"  # vLLM wants one, and reads nothing there
ALREADY_ACTIVE = "weight update is already active"  # vLLM's answer when an update was begun and never finished
HAS_ADAPTER = "already been loaded"


@dataclass(frozen=True, slots=True)
class Member:
    """A server of a group."""

    url: str  # http://host:port
    workers: int  # of its engine; each has a rank
    life: str = ""  # of the connection to it: after a new one the group is made again


@dataclass(frozen=True, slots=True)
class Order:
    """Says what has to be sent, and to whom."""

    backend: str  # "gloo" or "nccl"
    members: tuple[Member, ...]
    path: str  # of the memory that holds the weights
    manifest: dict[str, list]  # what lies there
    adapter: dict[str, Any] | None  # PEFT's config, when it is an adapter
    version: int
    deadline_s: float  # seconds for all of it


class ServerLost(RuntimeError):
    """A server of the group failed."""

    def __init__(self, url: str, said: str):
        super().__init__(f"{url}: {said}")
        self.url = url


class ServerGroup:
    """Speaks to all servers of a group at once. It has the four methods of vLLM's `VLLMWeightSyncClient`.

    vLLM's own client knows one server, and says no version at the end of an update. Here each server gets the rank at which its
    workers begin, and `version` labels what was sent.
    """

    def __init__(
        self,
        members: tuple[Member, ...],
        key: str,
        deadline_s: float,
        on_failure: Callable[[ServerLost], None] = lambda error: None,
    ):
        """Args: members: in the order of their ranks; key: of the servers; deadline_s: seconds for each call; on_failure:
        called once with the first error, at once and in any thread: the caller may stand in a collective meanwhile."""
        self.members, self.deadline_s = members, deadline_s
        self.version = 0  # of the next update
        self.adapter: dict[str, Any] | None = None  # PEFT's config, when the next update is that of an adapter
        self._headers = {"Authorization": authorization(key), "Content-Type": "application/json"}
        self._on_failure = on_failure
        # Proxies of the environment are meant for other machines than a cluster's own.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=ssl.create_default_context())
        )

    @property
    def world_size(self) -> int:
        """The ranks of the group, the sender's among them."""
        return 1 + sum(member.workers for member in self.members)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Lets all servers join the group. Args: init_info: of the first server. Raises ServerLost."""
        bodies, rank = {}, init_info["rank_offset"]
        for member in self.members:
            own = {"rank_offset": rank, "deadline_s": self.deadline_s}
            bodies[member.url] = {"init_info": init_info | own}
            rank += member.workers
        self._each(lambda member: self._post(member, "/init_weight_transfer_engine", bodies[member.url]))

    def start_weight_update(self) -> None:
        """Begins an update; for an adapter nothing has to be begun. Raises ServerLost."""
        if self.adapter is None:
            self._each(self._start)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Lets all servers take what is broadcast meanwhile. Raises ServerLost."""
        if self.adapter is None:
            self._each(lambda member: self._post(member, "/update_weights", {"update_info": update_info}))
        else:
            body = {"method": "receive_adapter", "args": [update_info, self.adapter]}
            self._each(lambda member: self._post(member, "/collective_rpc", body))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ends an update, and labels what is sampled from then on, with `version` if nothing else is given. Raises
        ServerLost."""
        version = str(self.version) if weight_version is None else weight_version
        if self.adapter is None:
            self._each(lambda member: self._post(member, "/finish_weight_update", {"weight_version": version}))
        else:
            self._each(lambda member: self._finish_adapter(member, version))

    def _start(self, member: Member) -> None:
        """One that a trainer before us began, and died in, is finished first: that gives every layer a whole set of tensors,
        whatever they hold, and ours overwrites them all."""
        try:
            self._post(member, "/start_weight_update", {})
        except ServerLost as error:
            if ALREADY_ACTIVE not in str(error):
                raise
            self._post(member, "/finish_weight_update", {})
            self._post(member, "/start_weight_update", {})

    def _finish_adapter(self, member: Member, version: str) -> None:
        self._post(member, "/update_weight_version", {"new_version": version})
        try:
            # The first adapter that a server is told of gets the id that ours has in its memory.
            self._post(member, "/v1/load_lora_adapter", {"lora_name": ADAPTER_NAME, "lora_path": ADAPTER_PATH})
        except ServerLost as error:
            if HAS_ADAPTER not in str(error):
                raise

    def _each(self, call: Callable[[Member], None]) -> None:
        """Calls all servers at once and waits for them. Raises the first error as soon as there is one."""
        pool = ThreadPoolExecutor(max_workers=len(self.members))
        try:
            for done in as_completed([pool.submit(call, member) for member in self.members]):
                done.result()
        except ServerLost as error:
            self._on_failure(error)
            raise
        finally:
            pool.shutdown(wait=False)

    def _post(self, member: Member, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(member.url + path, json.dumps(body).encode(), self._headers)
        try:
            with self._opener.open(request, timeout=self.deadline_s) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode(errors="replace")[:500]
            raise ServerLost(member.url, f"{path} failed ({error.code}): {said}") from None
        except (OSError, ValueError) as error:
            # Its repr could hold the headers of the request, and so the key.
            raise ServerLost(member.url, f"{path}: {type(error).__name__}: {error}") from None
