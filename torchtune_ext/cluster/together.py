"""Runs a trainer and its servers on a Ray cluster, and ends all of them together.

Ray gives places, GPUs and an actor on each of them (keeper.py). What an actor runs is the command that a user would type there:
`torchtune-ext run` for the trainer, under torchrun where it has several ranks, and vLLM's server. So ranks, signals and exit
statuses are those of every other run. Nothing is started a second time: the run ends without its trainer, or its last server.
"""

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from torchtune_ext.cluster import keeper
from torchtune_ext.cluster.member import Member, Plan, host_title, launch, version
from torchtune_ext.cluster.placement import Layout, Machine, layout, there_is, why_never
from torchtune_ext.measured.ray_connect import short
from torchtune_ext.run.errors import Failure, Mistake
from torchtune_ext.run.output import ENGINE_READY, attempt, labelled, say
from torchtune_ext.run.stop import NAMES
from torchtune_ext.sampling.records import EngineConfig
from torchtune_ext.sampling.server_command import KEY_VARIABLE

START_S = 60.0  # seconds for Ray to start the actors on their machines
LOOK_S = 0.2  # seconds between two looks at what the commands print
SILENT_S = 60.0  # seconds without an answer after which an actor counts as lost
ASK_S = 3.0  # seconds between two questions to the head of the cluster
# Seconds without an answer after which the head counts as lost. Ray ends its drivers and machines after 60: until then the
# actors answer, so that the trainer can be ended in good order.
HEAD_S = 30.0
STOPPED_S = 10.0  # seconds between two looks after which this process was itself stopped (Ctrl-Z), and blames nobody
SERVER_END_S = 10.0  # seconds that a server has to end by itself
OTHERS_S = 10.0  # seconds that torchrun has on the other machines to notice by itself that one of them failed
END_S = 30.0  # seconds for what was killed to be gone
NETWORK = {"gpus": "nccl", "cpus": "gloo"}  # by what ranks and servers compute on


class HeadLost(Failure):
    """The head of the cluster gives no answer. Any call of Ray may now wait until Ray ends this process."""


class Together:
    """A run on a cluster, from its placement to its end. It prints into `out` and `err`; Ray itself prints where it likes."""

    def __init__(self, ray: Any, plan: Plan, address: str, out: TextIO, err: TextIO):
        self.ray, self.plan, self.address, self.out, self.err = ray, plan, address, out, err
        self.trainers: list[Member] = []  # on each machine; rank 0 is with the first one
        self.servers: list[Member] = []
        self._group: Any = None  # Ray's placement group
        self._began = False  # whether the trainer has found all its servers
        self.cause = ""  # why the run is ended before its time, other than by a signal
        self._signals: list[int] = []
        self._signals_sent = 0  # how many of them have gone to the trainers
        self._others_at = self._kill_at = float("inf")
        self._nodes: Sequence[Mapping[str, Any]] = ()  # the machines, as the head last listed them
        self._head_at = time.monotonic()  # when that was
        self._over = threading.Event()
        self._looked_at = time.monotonic()

    def run(self) -> int:
        """Runs to the end and returns the exit status of the trainer.

        Raises:
            ValueError: the cluster cannot hold the run, or a machine of it cannot run it.
            RuntimeError: a server, the trainer or its machine was lost.
            HeadLost: the head of the cluster was lost.
        """
        with self._asking_the_head(), self._hearing():
            try:
                bundles = self._place()
                if bundles is None:
                    return 128 + self._signals[0]
                self._make(bundles)
                self._start(bundles)
                self._follow()
            finally:
                self._end_all()
                if not self._head_is_lost:
                    self._remove_group()
        if self.cause:
            raise (HeadLost if self._head_is_lost else Failure)(self.cause)
        status = next((member.status for member in self.trainers if member.status), 0)
        return status or (128 + self._signals[0] if any(member.lost for member in self.trainers) else 0)

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        """Takes note of signals. Ray has handlers of its own."""
        before = {number: signal.getsignal(number) for number in NAMES}
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self._signals.append(number))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # -- places -------------------------------------------------------------------------------------------------------

    def _machines(self) -> list[Machine]:
        resource = self.plan.request.resource
        return [
            Machine(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"].get(resource, 0)))
            for node in self._nodes
            if node["Alive"]
        ]

    @contextmanager
    def _asking_the_head(self) -> Iterator[None]:
        """Asks the head of the cluster for its machines, now and from time to time."""
        self._nodes = self.ray.nodes()
        threading.Thread(target=self._ask_head, daemon=True).start()
        try:
            yield
        finally:
            self._over.set()

    def _ask_head(self) -> None:
        """Runs in a thread: asks the head for the machines. Where it is lost, the question has no end."""
        while not self._over.wait(ASK_S):
            try:
                self._nodes = self.ray.nodes()
            except Exception:  # noqa: BLE001, S112 (Ray has many; without an answer the time runs on)
                continue
            self._head_at = time.monotonic()

    @property
    def _head_is_lost(self) -> bool:
        return time.monotonic() > self._head_at + HEAD_S

    def _place(self) -> Layout | None:
        """Waits for a place in the cluster and returns its layout, or None where a signal came first. If the run fits no
        machines that there are, it is laid out anew whenever others join.

        Raises:
            ValueError: the cluster has too little, or it is in use.
        """
        plan, request, bundles, previous = self.plan, self.plan.request, None, None
        give_up_at = time.monotonic() + plan.wait_s
        while True:
            machines = self._machines()
            there = there_is(request, machines)
            if there != previous:
                self._say(labelled([("ray", f"{self.address}, {there}")]))
                previous = there
            if bundles is None or why_never(request, bundles, machines):
                anew = layout(request, machines)
                never = why_never(request, anew, machines)
                if never and not plan.waits_for_machines:
                    raise Mistake(
                        f"{request.words()}: {never}, and the Ray cluster at {self.address} has {there}; "
                        "ask for less, add machines, or give it --wait SECONDS to grow"
                    )
                if anew != bundles:
                    # A cluster that grows by itself sees from the group what is missing.
                    self._remove_group()
                    self._group = self.ray.util.placement_group(
                        [{request.resource: amount} for amount in anew.amounts], strategy="PACK"
                    )
                    bundles = anew
            if self._group.wait(min(1.0, plan.wait_s)):
                return bundles
            if self._signals:
                return None
            if time.monotonic() > give_up_at:
                free = int(self.ray.available_resources().get(request.resource, 0))
                never = why_never(request, bundles, machines)
                raise Mistake(
                    f"{request.words()}: no place within {plan.wait_s:g} s{f' ({never})' if never else ''}. The Ray cluster at "
                    f"{self.address} has {there}, of which {free} are free; wait longer with --wait SECONDS, or see with "
                    "`ray status` who has them"
                )

    def _remove_group(self) -> None:
        if self._group is not None:
            self.ray.util.remove_placement_group(self._group)
            self._group = None

    def _make(self, bundles: Layout) -> None:
        """Starts an actor for each command, and asks each what its machine has.

        Raises:
            ValueError: a machine cannot run its part.
            RuntimeError: a machine is gone.
        """
        plan, group, several = self.plan, self._group, bundles.machines > 1
        # By value: a machine with another version of torchtune_ext must be able to say so.
        self.ray.cloudpickle.register_pickle_by_value(keeper)
        actor = self.ray.remote(keeper.Keeper)
        where = self.ray.util.placement_group_table(group)["bundles_to_node_id"]
        # A machine that has just joined may hold a bundle before the head has listed it.
        self._nodes = self.ray.nodes()
        known = {machine.name: machine for machine in self._machines()}
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        def member(title: str, bundle: int, amount: int) -> Member:
            machine = known.get(where[bundle])
            if machine is None:
                raise Failure(f"the machine of {title} has left the cluster before the run began; start it again")
            options = {"num_gpus": amount, "num_cpus": 0} if plan.request.kind == "gpus" else {"num_cpus": amount}
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            handle = actor.options(scheduling_strategy=strategy, max_restarts=0, **options).remote()
            return Member(f"{title} on {machine.address}", machine, handle)

        for i in range(bundles.machines):
            self.trainers.append(member(f"trainer {i}" if several else "the trainer", i, bundles.ranks))
        for i in range(plan.request.servers):
            self.servers.append(member(f"server {i}", bundles.bundle_of_server(i), plan.request.each))
        ours = version()
        for each, (state, facts) in self._ask("about", plan.folder, plan.file):
            if state == "ready" and facts["version"] != ours:
                state, facts = "refused", {"why": f"torchtune_ext {facts['version']} is there and {ours} here"}
            if state == "refused":
                raise Mistake(f"{each.title}: {facts['why']}; all machines of the cluster need the same")
            each.log = facts["log"]

    def _ask(self, method: str, *arguments: Any, of: Sequence[Member] = ()) -> list[tuple[Member, Any]]:
        """Calls a method of each actor, and returns what they say. Raises RuntimeError."""
        promised = [(each, getattr(each.keeper, method).remote(*arguments)) for each in of or self._all()]
        answers, give_up_at = [], time.monotonic() + START_S
        for each, question in promised:
            try:
                answers.append((each, self.ray.get(question, timeout=max(0.1, give_up_at - time.monotonic()))))
            except self.ray.exceptions.RayError as error:
                raise Failure(f"{each.title} could not be started: {short(error)}") from error
        return answers

    # -- commands -----------------------------------------------------------------------------------------------------

    def _start(self, bundles: Layout) -> None:
        """Starts all commands. Raises RuntimeError, ValueError."""
        plan, first, addresses = self.plan, self.trainers[0], []
        way = route(first.machine.address, [server.machine.address for server in self.servers], plan.request.kind)
        for server, host in zip(self.servers, way.hosts, strict=True):
            ((_, port),) = self._ask("free_port", host, of=[server])
            addresses.append(f"http://{host}:{port}")
            own = engine_words(plan.engine, addresses[-1:], way.transfer)
            server.python_words = server_words(plan.recipe, plan.config, plan.words, own, host)
            self._say(labelled([(f"server {len(addresses) - 1}", f"{addresses[-1]} on {host_title(server)}")]))
        meet = ""
        if bundles.machines > 1:
            ((_, port),) = self._ask("free_port", first.machine.address, of=[first])
            meet = f"{first.machine.address}:{port}"
        settings = ["--config", plan.config, *plan.words, *engine_words(plan.engine, addresses, way.transfer)]
        for i, trainer in enumerate(self.trainers):
            trainer.python_words = ["-m", "torchtune_ext", "run", *launch(bundles, i, meet), plan.recipe, *settings]
        ranks = f"{plan.request.ranks} ranks" if plan.request.ranks > 1 else "1 rank"
        self._say(labelled([("trainer", f"{ranks} on {', '.join(each.machine.address for each in self.trainers)}")]))
        variables = {**plan.variables, "RAY_ADDRESS": self.address, KEY_VARIABLE: plan.key}
        for each in self._all():
            serves = each in self.servers
            patience_s = SERVER_END_S if serves else plan.patience_s
            ((_, why),) = self._ask("start", each.python_words, variables, plan.folder, patience_s, serves, of=[each])
            if why:
                raise Failure(f"{each.title} could not be started: {why}")
            each.answered_at = time.monotonic()

    def _follow(self) -> None:
        """Shows what the trainer prints until it has ended everywhere, and ends it if something else goes wrong."""
        while any(each.runs for each in self.trainers):
            self._look()
            self._judge()

    def _judge(self) -> None:
        """Decides whether the run goes on."""
        now, running = time.monotonic(), [each for each in self.trainers if each.runs]
        for number in self._signals[self._signals_sent :]:
            self._signals_sent += 1
            # A second signal waits for nothing.
            self._tell(running, f"{int(number)}" if self._signals_sent == 1 else "end 0")
            self._kill_at = min(self._kill_at, now + self.plan.patience_s)
        if not self.cause and self._signals_sent == 0:
            lost = next((each for each in self.trainers if each.lost), None)
            gone = [each for each in self.servers if not each.runs]
            if lost or (running and len(gone) == len(self.servers)):
                self.cause = (lost or gone[-1]).end()
            elif running and gone and not self._began:
                # The trainer would wait for it as long as a server may take to start.
                self.cause = gone[0].end()
            elif running and self._head_is_lost:
                self.cause = f"the head of the Ray cluster at {self.address} gives no answer for {HEAD_S:g} s"
            for each in gone if not self.cause else ():
                if not each.announced:
                    left = len(self.servers) - len(gone)
                    self._say(f"ray: {each.end()}\nray: the run goes on with {left} of {len(self.servers)} servers")
                each.announced = True
            if self.cause:
                say(f"ray: {self.cause.splitlines()[0]}; the run ends", self.err)
                self._tell(running, f"end {self.plan.patience_s}")
        if any(each.status for each in self.trainers) and self._others_at == float("inf"):
            self._others_at = now + OTHERS_S
        if now > self._others_at:
            self._others_at = float("inf") if not running else now + END_S
            self._tell(running, f"end {self.plan.patience_s}")
        if now > self._kill_at:
            self._kill_at = now + END_S
            self._tell(running, "end 0")

    def _end_all(self) -> None:
        """Ends what still runs, and waits for it. The actors go with the placement group."""
        self._tell([each for each in self.trainers if each.runs], "end 0")
        self._tell([each for each in self.servers if each.runs], f"end {SERVER_END_S}")
        give_up_at = time.monotonic() + SERVER_END_S + END_S
        while any(each.runs for each in self._all()) and time.monotonic() < give_up_at:
            self._look()
        for each in self._all():
            if each.runs:
                say(f"ray: {each.title} does not end; Ray kills its actor, and the guard beside it the rest", self.err)

    # -- actors -------------------------------------------------------------------------------------------------------

    def _all(self) -> list[Member]:
        return [*self.trainers, *self.servers]

    def _say(self, text: str) -> None:
        say(text, self.out)

    def _tell(self, members: Sequence[Member], line: str) -> None:
        for each in members:
            each.keeper.tell.remote(line)

    def _look(self) -> None:
        """Asks every actor what its command has printed and whether it has ended."""
        running, now = [each for each in self._all() if each.runs], time.monotonic()
        if now > self._looked_at + STOPPED_S:
            self._head_at = now
            for each in running:
                each.answered_at = now
        self._looked_at = now
        for each in running:
            each.question = each.question or each.keeper.look.remote()
        ready, _ = self.ray.wait([each.question for each in running], num_returns=len(running), timeout=LOOK_S)
        for each in running:
            if each.question in ready:
                question, each.question = each.question, None
                try:
                    text, each.status = self.ray.get(question)
                except self.ray.exceptions.ActorUnavailableError:
                    # Ray may reach it again.
                    pass
                except self.ray.exceptions.RayError as error:
                    each.lost = self._why_lost(each, error)
                else:
                    each.answered_at = time.monotonic()
                    self._show(each, each.decoder.decode(text))
            if time.monotonic() > each.answered_at + SILENT_S:
                each.lost = each.lost or f"no answer in {SILENT_S:g} s"
        time.sleep(LOOK_S)

    def _why_lost(self, member: Member, error: Exception) -> str:
        alive = any(machine.name == member.machine.name for machine in self._machines())
        return short(error) if alive else f"its machine has left the cluster ({short(error)})"

    def _show(self, member: Member, text: str) -> None:
        """Keeps the last lines. Prints what rank 0 says, and with their address the lines of the trainer's other machines."""
        *lines, begun = (member.begun + text).split("\n")
        # A progress bar begins its line again and again: its newest state is kept.
        member.begun = begun[begun.rfind("\r") + 1 :]
        member.tail.extend(lines)
        if member is self.trainers[0]:
            self._began = self._began or any(ENGINE_READY in line for line in lines)
            attempt(self.out, lambda: (self.out.write(text), self.out.flush()))
        elif member in self.trainers:
            for line in lines:
                self._say(f"[{member.machine.address}] {line}")


@dataclass(frozen=True, slots=True)
class Route:
    """How the trainer and its servers reach each other."""

    hosts: tuple[str, ...]  # at which each server listens
    transfer: str  # `engine.transfer`


def route(trainer: str, servers: Sequence[str], kind: str) -> Route:
    """Returns how servers are reached. On rank 0's machine they read its memory, and listen to that machine only; if one is
    elsewhere, the weights of all travel over the network.

    Args:
        trainer: address of rank 0's machine.
        servers: that of each server's machine.
        kind: "gpus" or "cpus".
    """
    if all(server == trainer for server in servers):
        return Route(("127.0.0.1",) * len(servers), "shm")
    return Route(tuple(servers), NETWORK[kind])


def server_words(recipe: str, config: str, words: Sequence[str], settings: Sequence[str], host: str) -> list[str]:
    """Returns what stands behind `python` to start a server for a run, on the machine of the server.

    Args:
        words: settings of the run.
        settings: those that `engine_words` returns for this server.
    """
    return [
        *("-m", "torchtune_ext", "serve", "--config", config, "--recipe", recipe, "--host", host),
        *(*words, *settings),
    ]


def engine_words(engine: EngineConfig, addresses: Sequence[str], transfer: str) -> list[str]:
    """Returns the settings by which trainer and servers find each other, to stand behind those of the run.

    The GPUs that the config names are those of an engine on the trainer's machine, and Ray numbers them anew.
    """
    words = [f"engine.address={addresses[0] if len(addresses) == 1 else '[' + ','.join(addresses) + ']'}"]
    words.append(f"engine.transfer={transfer}")
    if engine.devices is not None:
        words.append("engine.devices=null")
    if engine.count is not None:
        words.append("engine.count=null")
    if engine.sleep:
        words.append("engine.sleep=false")
    return words
