"""The driver of a run on a Ray cluster: it places the trainer and its servers, starts them, and ends all of them together.

Ray gives places, GPUs and an actor on each of them (actor.py). What an actor runs is the command that a user would type there:
`torchtune-ext run` for the trainer, under torchrun where it has several ranks, and `torchtune-ext serve` for vLLM's server. So
ranks, signals and exit statuses are those of every other run. Nothing is started a second time: the run ends without its
trainer, or its last server.
"""

import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from torchtune_ext import __version__
from torchtune_ext.cluster import actor
from torchtune_ext.cluster.placement import KINDS, Machine, Request, there_is
from torchtune_ext.run.errors import Failure, Mistake, text_of
from torchtune_ext.run.output import ENGINE_READY, labelled, say
from torchtune_ext.run.stop import NAMES

WAIT_S = 30.0  # seconds to wait for what is in use, where the user names none
START_S = 60.0  # seconds for Ray to start the actors on their machines
LOOK_S = 0.2  # seconds between two looks at what the commands print
# Silence is counted in looks: while this process itself is stopped (Ctrl-Z), nobody falls silent.
SILENT_S = 60.0  # seconds without an answer after which an actor counts as lost
SERVER_END_S = 10.0  # seconds that a server has to end by itself
OTHERS_S = 10.0  # seconds that torchrun has on the other machines to notice by itself that one of them failed
END_S = 30.0  # seconds for what was killed to be gone
LAST_LINES = 20  # lines of a command's output that are shown if it ends
NETWORK = {"gpus": "nccl", "cpus": "gloo"}  # by what ranks and servers compute on


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run."""

    recipe: str
    config: str  # as the user named it
    words: tuple[str, ...]  # settings, key=value
    request: Request
    folder: str  # in which it is started, on each machine
    path: str  # what each machine has to see: the folder, or in it the config if it is the user's own
    variables: Mapping[str, str]  # of the environment of trainer and servers, with the key that the servers ask for
    patience_s: float  # seconds that the trainer has to end after a signal
    wait_s: float | None  # seconds to wait for a place; None: WAIT_S, if the machines that are there may hold it


@dataclass(eq=False, slots=True)
class Member:
    """A command of the run on a machine of the cluster."""

    title: str
    address: str  # of the machine
    actor: Any
    log: str = ""  # file on its machine that has what it prints
    port: int = 0  # one that was free there
    status: int | None = None  # its exit status; None: it runs, or is lost
    lost: str = ""  # why nothing is known of it any more
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    begun: bytes = b""  # a line of its output that has no end yet
    announced: bool = False  # whether the user knows that it has ended
    question: Any = None  # Ray's handle of an answer that is still to come
    silent_s: float = 0.0  # seconds since its last answer

    @property
    def runs(self) -> bool:
        return self.status is None and not self.lost

    def end(self) -> str:
        """Returns how it ended."""
        if self.lost:
            return f"{self.title} is lost: {self.lost}"
        text = "; the last that it said:\n" + "\n".join(f"    {line}" for line in self.tail) if self.tail else ""
        return f"{self.title} ended with status {self.status}{text}"


class Driver:
    """A run on a cluster, from its placement to its end. It prints into `out` and `err`; Ray itself prints where it likes."""

    def __init__(self, ray: Any, plan: Plan, address: str, out: TextIO, err: TextIO):
        self.ray, self.plan, self.address, self.out, self.err = ray, plan, address, out, err
        self.trainers: list[Member] = []  # on each machine; rank 0 is with the first one
        self.servers: list[Member] = []
        self.cause = ""  # why the run is ended before its time, other than by a signal
        self._group: Any = None  # Ray's placement group
        self._started = False  # whether commands may run
        self._engines_ready = False  # whether the trainer has found all its servers
        self._signals: list[int] = []
        self._signals_sent = 0  # how many of them have gone to the trainers
        self._failed_s = 0.0  # seconds since a trainer failed

    def run(self) -> int:
        """Runs to the end and returns the exit status of the trainer.

        Raises:
            ValueError: the cluster cannot hold the run, or a machine of it cannot run it.
            RuntimeError: a server, the trainer, or its machine was lost.
        """
        with self._signals_noted():
            try:
                machines = self._place()
                if machines is None:
                    return 128 + self._signals[0]
                self._make_members(machines)
                self._start()
                while any(each.runs for each in self.trainers):
                    self._look()
                    self._judge()
            finally:
                if self._started:
                    self._end_all()
                if self._group is not None:
                    self.ray.util.remove_placement_group(self._group)
        if self.cause:
            raise Failure(self.cause)
        status = next((member.status for member in self.trainers if member.status), 0)
        return status or (128 + self._signals[0] if any(member.lost for member in self.trainers) else 0)

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
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
            for node in self.ray.nodes()
            if node["Alive"]
        ]

    def _place(self) -> int | None:
        """Waits for a place in the cluster. Returns on how many machines the trainer is, or None where a signal came first.

        Raises:
            ValueError: the cluster has too little, or it is in use.
        """
        request, there = self.plan.request, self._machines()
        self._say(labelled([("ray", f"{self.address}, {there_is(request, there)}")]))
        largest = max((machine.total for machine in there), default=0)
        machines = request.machines(largest)
        amounts = request.bundles(machines)
        # A cluster that grows by itself sees from the group what is missing.
        self._group = self.ray.util.placement_group([{request.resource: amount} for amount in amounts], strategy="PACK")
        may_fit = max(amounts) <= largest and sum(amounts) <= sum(machine.total for machine in there)
        wait_s = self.plan.wait_s or (WAIT_S if may_fit else 0.0)
        give_up_at = time.monotonic() + wait_s
        while not self._group.wait(min(1.0, wait_s)):
            if self._signals:
                return None
            if time.monotonic() > give_up_at:
                free = int(self.ray.available_resources().get(request.resource, 0))
                parts = ", ".join(map(str, amounts))
                raise Mistake(
                    f"{request.words()}: no place within {wait_s:g} s for {parts} {KINDS[request.kind][1]}, each number on "
                    f"one machine. The Ray cluster at {self.address} has {there_is(request, self._machines())}, of which "
                    f"{free} are free; ask for less, wait longer with --wait SECONDS, also for machines that join, or see "
                    "with `ray status` who has them"
                )
        return machines

    def _make_members(self, machines: int) -> None:
        """Starts an actor for each command, and asks each what its machine has.

        Raises:
            ValueError: a machine cannot run its part.
            RuntimeError: a machine is gone.
        """
        plan = self.plan
        # By value: a machine with another version of torchtune_ext must be able to say so.
        self.ray.cloudpickle.register_pickle_by_value(actor)
        remote = self.ray.remote(actor.Actor)
        where = self.ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        addresses = {machine.name: machine.address for machine in self._machines()}

        def member(title: str, bundle: int, amount: int) -> Member:
            address = addresses.get(where[bundle])
            if address is None:
                raise Failure(f"the machine of {title} has left the cluster before the run began; start it again")
            options = {"num_gpus": amount, "num_cpus": 0} if plan.request.kind == "gpus" else {"num_cpus": amount}
            strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            )
            handle = remote.options(scheduling_strategy=strategy, max_restarts=0, **options).remote()
            return Member(f"{title} on {address}", address, handle)

        for bundle, amount in enumerate(plan.request.bundles(machines)):
            if bundle < machines:
                title = f"trainer {bundle}" if machines > 1 else "the trainer"
                self.trainers.append(member(title, bundle, amount))
            else:
                self.servers.append(member(f"server {bundle - machines}", bundle, amount))
        questions = [each.actor.about.remote(plan.path, __version__) for each in self._all()]
        for each, (why, each.log, each.port) in zip(self._all(), self._answers(questions), strict=True):
            if why:
                raise Mistake(f"{each.title}: {why}; all machines of the cluster need the same")

    def _answers(self, questions: Sequence[Any]) -> list[Any]:
        """Returns what the members answer to a question, which stands for each of them in `questions`. Raises RuntimeError."""
        answers, give_up_at = [], time.monotonic() + START_S
        for each, question in zip(self._all(), questions, strict=True):
            try:
                answers.append(self.ray.get(question, timeout=max(0.1, give_up_at - time.monotonic())))
            except self.ray.exceptions.RayError as error:
                raise Failure(f"{each.title} could not be started: {text_of(error)}") from error
        return answers

    # -- commands -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Starts all commands. Raises RuntimeError."""
        plan, first = self.plan, self.trainers[0]
        hosts, transfer = route(first.address, [each.address for each in self.servers], plan.request.kind)
        addresses = [f"http://{host}:{each.port}" for host, each in zip(hosts, self.servers, strict=True)]
        settings = ["--config", plan.config, *plan.words, *engine_words(addresses, transfer)]
        meet = f"{first.address}:{first.port}"
        machines = len(self.trainers)
        commands = [
            ["-m", "torchtune_ext", "run", *launch(plan.request.ranks, machines, i, meet), plan.recipe, *settings]
            for i in range(machines)
        ]
        for i, (server, host, address) in enumerate(zip(self.servers, hosts, addresses, strict=True)):
            own = engine_words([address], transfer)
            commands.append(server_words(plan.recipe, plan.config, plan.words, own, host))
            lives = f"{address} on {server.address}, its log there: {server.log}"
            self._say(labelled([(f"server {i}", lives)]))
        ranks = f"{plan.request.ranks} ranks" if plan.request.ranks > 1 else "1 rank"
        self._say(labelled([("trainer", f"{ranks} on {', '.join(each.address for each in self.trainers)}")]))
        variables = {**plan.variables, "RAY_ADDRESS": self.address}
        self._started = True
        questions = [
            each.actor.start.remote(
                words, variables, plan.folder, SERVER_END_S if each in self.servers else plan.patience_s
            )
            for each, words in zip(self._all(), commands, strict=True)
        ]
        self._answers(questions)

    def _look(self) -> None:
        """Asks every actor what its command has printed and whether it has ended."""
        running = [each for each in self._all() if each.runs]
        for each in running:
            each.question = each.question or each.actor.look.remote()
        time.sleep(LOOK_S)
        ready, _ = self.ray.wait([each.question for each in running], num_returns=len(running), timeout=0)
        for each in running:
            each.silent_s += LOOK_S
            if each.question in ready:
                self._hear(each)
            if each.silent_s > SILENT_S:
                each.lost = each.lost or f"no answer in {SILENT_S:g} s"

    def _hear(self, member: Member) -> None:
        """Takes the answer of an actor, and prints what rank 0 says, and with their address the lines of other trainers."""
        question, member.question = member.question, None
        try:
            output, member.status = self.ray.get(question)
        except self.ray.exceptions.ActorUnavailableError:
            # Ray may reach it again.
            return
        except self.ray.exceptions.RayError as error:
            member.lost = text_of(error)
            return
        member.silent_s = 0.0
        *lines, begun = (member.begun + output).split(b"\n")
        # A progress bar begins its line again and again: its newest state is kept.
        member.begun = begun[begun.rfind(b"\r") + 1 :]
        if member.status is not None and member.begun:
            lines.append(member.begun)
        for line in (line.decode(errors="replace") for line in lines):
            member.tail.append(line)
            if member is self.trainers[0]:
                self._engines_ready = self._engines_ready or ENGINE_READY in line
                self._say(line)
            elif member in self.trainers:
                self._say(f"[{member.address}] {line}")

    def _judge(self) -> None:
        """Decides whether the run goes on."""
        running = [each for each in self.trainers if each.runs]
        for number in self._signals[self._signals_sent :]:
            # A second signal waits for nothing.
            self._tell(running, number, 0.0 if self._signals_sent else self.plan.patience_s)
            self._signals_sent += 1
        if not self.cause and not self._signals_sent:
            self.cause = self._what_is_lost()
            if self.cause:
                say(f"ray: {self.cause.splitlines()[0]}; the run ends", self.err)
        if any(each.status for each in self.trainers):
            self._failed_s += LOOK_S
        if self.cause or self._failed_s > OTHERS_S:
            # However often it is told, a guard sends the signal once and keeps its first deadline.
            self._tell(running, signal.SIGTERM, self.plan.patience_s)

    def _what_is_lost(self) -> str:
        """Returns why the run has to end, or "". Says which servers it goes on without."""
        gone = [each for each in self.servers if not each.runs]
        left = len(self.servers) - len(gone)
        for each in self.trainers:
            if each.lost:
                return each.end()
        if not any(each.runs for each in self.trainers):
            return ""
        # Before the trainer has found all its servers, it would wait for one as long as that may take to start.
        if gone and not (left and self._engines_ready):
            return gone[-1].end()
        for each in gone:
            if not each.announced:
                self._say(f"ray: {each.end()}\nray: the run goes on with {left} of {len(self.servers)} servers")
            each.announced = True
        return ""

    def _end_all(self) -> None:
        """Ends what still runs, and waits for it. The actors go with the placement group."""
        self._tell([each for each in self.trainers if each.runs], signal.SIGTERM, 0.0)
        self._tell([each for each in self.servers if each.runs], signal.SIGTERM, SERVER_END_S)
        give_up_at = time.monotonic() + SERVER_END_S + END_S
        while any(each.runs for each in self._all()) and time.monotonic() < give_up_at:
            self._look()
        for each in self._all():
            if each.runs:
                say(f"ray: {each.title} does not end; Ray kills its actor, and the guard beside it the rest", self.err)

    def _all(self) -> list[Member]:
        return [*self.trainers, *self.servers]

    def _say(self, text: str) -> None:
        say(text, self.out)

    def _tell(self, members: Sequence[Member], number: int, seconds: float) -> None:
        for each in members:
            each.actor.tell.remote(number, seconds)


def route(trainer: str, servers: Sequence[str], kind: str) -> tuple[list[str], str]:
    """Returns the host at which each server listens, and `engine.transfer`. On rank 0's machine servers read its memory, and
    listen to that machine only; if one is elsewhere, the weights of all travel over the network.

    Args:
        trainer: address of rank 0's machine.
        servers: that of each server's machine.
        kind: "gpus" or "cpus".
    """
    if all(server == trainer for server in servers):
        return ["127.0.0.1"] * len(servers), "shm"
    return list(servers), NETWORK[kind]


def launch(ranks: int, machines: int, number: int, meet: str) -> list[str]:
    """Returns the options of torchrun on the trainer's machine with this number, from 0, of so many.

    Args:
        ranks: of the trainer, on all its machines.
        meet: HOST:PORT on the first machine, where the ranks of several machines meet. It is given as the rendezvous,
            without which torchtune starts torchrun as for one machine.
    """
    if machines == 1:
        return ["--nproc_per_node", str(ranks)] if ranks > 1 else []
    options = ["--nnodes", str(machines), "--node_rank", str(number), "--nproc_per_node", str(ranks // machines)]
    return [*options, "--rdzv_backend", "static", "--rdzv_endpoint", meet]


def server_words(recipe: str, config: str, words: Sequence[str], settings: Sequence[str], host: str) -> list[str]:
    """Returns what stands behind `python` to start a server for a run, on the machine of the server.

    Args:
        words: settings of the run.
        settings: those that `engine_words` returns for this server.
    """
    command = ["-m", "torchtune_ext", "serve", "--config", config, "--recipe", recipe, "--host", host]
    return [*command, *words, *settings]


def engine_words(addresses: Sequence[str], transfer: str) -> list[str]:
    """Returns the settings by which trainer and servers find each other, to stand behind those of the run.

    What a config says of an engine on the trainer's machine counts for nothing here: Ray numbers the GPUs anew.
    """
    address = addresses[0] if len(addresses) == 1 else f"[{','.join(addresses)}]"
    own = ("engine.devices=null", "engine.count=null", "engine.sleep=false")
    return [f"engine.address={address}", f"engine.transfer={transfer}", *own]
