"""The driver of a run on a Ray cluster: it places the trainer and its servers, starts them, and ends all together.

Ray gives places, GPUs and an actor on each of them (actor.py). An actor runs the command that a user would type there:
`torchtune-ext run` for the trainer, and `torchtune-ext serve` for vLLM's server. So ranks, signals and exit statuses
are those of every other run. The run ends with its trainer, or with any of its servers; nothing is started a second
time.
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
from torchtune_ext.run.errors import RunFailure, UsageError, describe_error
from torchtune_ext.run.output import format_labels, print_text
from torchtune_ext.run.stop import SIGNAL_NAMES

# What ranks and servers compute on: Ray's name of it, and ours for several of them.
RESOURCE_NAMES = {"gpus": ("GPU", "GPUs"), "cpus": ("CPU", "cores")}
PLACEMENT_TIMEOUT_S = 30.0  # seconds to wait for a place, if the user does not say
ACTOR_TIMEOUT_S = 60.0  # seconds for Ray to start the actors on their machines
POLL_S = 0.2  # seconds between two looks at what the commands print
# Seconds without an answer after which an actor counts as lost. They are counted in looks, so that nobody falls silent
# while this process itself is stopped (Ctrl-Z).
SILENCE_TIMEOUT_S = 60.0
SERVER_END_S = 10.0  # seconds that a server has to end by itself
EXIT_TIMEOUT_S = 30.0  # seconds for what was killed to be gone
LAST_LINES = 20  # lines of a command's output that are shown if it ends
NETWORK_TRANSFER = {"gpus": "nccl", "cpus": "gloo"}  # `engine.transfer` between machines, by what they compute on


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """The resources that a run asks of the cluster."""

    kind: str  # "gpus" or "cpus"
    ranks: int  # ranks of the trainer, each with one GPU or core, all on one machine
    servers: int
    per_server: int = 1  # GPUs or cores of a server

    def bundles(self) -> list[int]:
        """Returns the GPUs or cores of each bundle: the trainer's, and then each server's."""
        # Ray puts a bundle on one machine, which is what a trainer and a server each need.
        return [self.ranks] + [self.per_server] * self.servers

    def flags(self) -> str:
        """Returns the words of the command that ask for this."""
        return f"--train-{self.kind} {self.ranks} --engine-{self.kind} {self.servers * self.per_server}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A run, as the command asks for it."""

    recipe: str
    config: str  # as the user named it
    overrides: tuple[str, ...]  # settings, key=value
    request: ResourceRequest
    folder: str  # the working folder on each machine
    required_path: str  # what each machine has to see: the folder, or in it the config if it is the user's own
    variables: Mapping[str, str]  # environment of trainer and servers, with the key that the servers ask for
    patience_s: float  # seconds that the trainer has to end after a signal
    wait_s: float  # seconds to wait for a place


@dataclass(eq=False, slots=True)
class Member:
    """A command of the run on a machine of the cluster."""

    title: str
    address: str  # address of the machine
    actor: Any
    log: str = ""  # the file on its machine with its output
    port: int = 0  # a port that was free there
    status: int | None = None  # its exit status; None: it runs, or is lost
    lost_reason: str = ""  # why nothing is known about it any more
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    partial_line: bytes = b""  # a line of its output that has no end yet
    pending_call: Any = None  # Ray's handle of an answer that is still to come
    silent_s: float = 0.0  # seconds since its last answer

    @property
    def is_running(self) -> bool:
        return self.status is None and not self.lost_reason

    def exit_summary(self) -> str:
        """Returns how it ended."""
        if self.lost_reason:
            return f"{self.title} is lost: {self.lost_reason}"
        text = "; the last that it said:\n" + "\n".join(f"    {line}" for line in self.tail) if self.tail else ""
        return f"{self.title} ended with status {self.status}{text}"


class Driver:
    """A run on a cluster, from its placement to its end. It prints into `out` and `err`."""

    def __init__(self, ray: Any, plan: Plan, address: str, out: TextIO, err: TextIO):
        self.ray, self.plan, self.address, self.out, self.err = ray, plan, address, out, err
        self.members: list[Member] = []  # the trainer, and behind it the servers
        self.cause = ""  # why the run ends early, other than by a signal
        self._group: Any = None  # Ray's placement group
        self._started = False  # whether commands may run
        self._signals: list[int] = []
        self._signals_sent = 0  # how many of them the trainer has got

    def run(self) -> int:
        """Runs to the end and returns the exit status of the trainer.

        Raises:
            ValueError: the cluster cannot hold the run, or a machine of it cannot run it.
            RuntimeError: a server, the trainer, or its machine was lost.
        """
        with self._capture_signals():
            try:
                if not self._wait_for_placement():
                    return 128 + self._signals[0]
                self._make_members()
                self._start()
                while self.members[0].is_running:
                    self._poll()
                    self._check_run()
            finally:
                # Servers first end by themselves. Removing the group kills all actors.
                if self._started:
                    self._end_all()
                if self._group is not None:
                    self.ray.util.remove_placement_group(self._group)
        if self.cause:
            raise RunFailure(self.cause)
        status = self.members[0].status
        # The trainer may be lost on the way only if a signal ended the run.
        return 128 + self._signals[0] if status is None else status

    @contextmanager
    def _capture_signals(self) -> Iterator[None]:
        """Notes signals instead of acting on them."""
        # Ray has handlers of its own, which stand again afterwards.
        before = {number: signal.getsignal(number) for number in SIGNAL_NAMES}
        for number, handler in before.items():
            # A signal that was ignored (nohup) stays so.
            if handler != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self._signals.append(number))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # -- places -------------------------------------------------------------------------------------------------------

    def _resource_summary(self) -> str:
        """Returns the resources of the cluster: "12 GPUs on 2 machines (10.0.0.1: 8, 10.0.0.2: 4)"."""
        resource, name = RESOURCE_NAMES[self.plan.request.kind]
        nodes = [node for node in self.ray.nodes() if node["Alive"] and node["Resources"].get(resource)]
        totals = [int(node["Resources"][resource]) for node in nodes]
        each = ", ".join(f"{node['NodeManagerAddress']}: {total}" for node, total in zip(nodes, totals, strict=True))
        machines = f"{len(nodes)} machine{'s' * (len(nodes) != 1)}"
        return f"{sum(totals)} {name} on {machines}" + (f" ({each})" if each else "")

    def _wait_for_placement(self) -> bool:
        """Waits for a place in the cluster. Returns False if a signal came first. Raises ValueError if none is free."""
        request, wait_s = self.plan.request, self.plan.wait_s
        resource, name = RESOURCE_NAMES[request.kind]
        print_text(format_labels([("ray", f"{self.address}, {self._resource_summary()}")]), self.out)
        # Ray places a group as a whole or not at all. Otherwise two runs could each hold what the other one waits for.
        # And a cluster that grows by itself sees from the group what is missing.
        self._group = self.ray.util.placement_group(
            [{resource: amount} for amount in request.bundles()], strategy="PACK"
        )
        give_up_at = time.monotonic() + wait_s
        while not self._group.wait(min(1.0, wait_s)):
            if self._signals:
                return False
            if time.monotonic() > give_up_at:
                free = int(self.ray.available_resources().get(resource, 0))
                parts = ", ".join(map(str, request.bundles()))
                raise UsageError(
                    f"{request.flags()}: no place within {wait_s:g} s for {parts} {name}, each number on one machine. The Ray "
                    f"cluster at {self.address} has {self._resource_summary()}, of which {free} are free; ask for less, wait longer "
                    "with --wait SECONDS, also for machines that join, or see with `ray status` who has them"
                )
        return True

    def _make_members(self) -> None:
        """Starts an actor for each command. Raises ValueError if a machine is unfit, RuntimeError if it is gone."""
        plan = self.plan
        # By value, so that a machine with another version of torchtune_ext can say so.
        self.ray.cloudpickle.register_pickle_by_value(actor)
        remote = self.ray.remote(actor.Actor)
        where = self.ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self.ray.nodes() if node["Alive"]}
        for bundle, amount in enumerate(plan.request.bundles()):
            title, address = f"server {bundle - 1}" if bundle else "the trainer", addresses.get(where[bundle])
            if address is None:
                raise RunFailure(f"the machine of {title} has left the cluster before the run began; start it again")
            # The bundle of a GPU run has no CPUs, of which Ray would ask one by default.
            options = {"num_gpus": amount, "num_cpus": 0} if plan.request.kind == "gpus" else {"num_cpus": amount}
            strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            )
            handle = remote.options(scheduling_strategy=strategy, max_restarts=0, **options).remote()
            self.members.append(Member(f"{title} on {address}", address, handle))
        questions = [each.actor.about.remote(plan.required_path, __version__) for each in self.members]
        for each, (why, each.log, each.port) in zip(self.members, self._answers(questions), strict=True):
            if why:
                raise UsageError(f"{each.title}: {why}; all machines of the cluster need the same")

    def _answers(self, questions: Sequence[Any]) -> list[Any]:
        """Returns the members' answers to `questions`, one each, in order. Raises RuntimeError if one is missing."""
        answers, give_up_at = [], time.monotonic() + ACTOR_TIMEOUT_S
        for each, question in zip(self.members, questions, strict=True):
            try:
                answers.append(self.ray.get(question, timeout=max(0.1, give_up_at - time.monotonic())))
            except self.ray.exceptions.RayError as error:
                raise RunFailure(f"{each.title} could not be started: {describe_error(error)}") from error
        return answers

    # -- commands -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Starts all commands. Raises RuntimeError."""
        plan, (trainer, *servers) = self.plan, self.members
        hosts, transfer = choose_transfer(trainer.address, [each.address for each in servers], plan.request.kind)
        addresses = [f"http://{host}:{each.port}" for host, each in zip(hosts, servers, strict=True)]
        ranks = plan.request.ranks
        launch = ["--nproc_per_node", str(ranks)] if ranks > 1 else []
        settings = ["--config", plan.config, *plan.overrides, *engine_overrides(addresses, transfer)]
        commands = [["-m", "torchtune_ext", "run", *launch, plan.recipe, *settings]]
        for i, (server, host, address) in enumerate(zip(servers, hosts, addresses, strict=True)):
            own = engine_overrides([address], transfer)
            commands.append(server_args(plan.recipe, plan.config, plan.overrides, own, host))
            lives = f"{address} on {server.address}, its log there: {server.log}"
            print_text(format_labels([(f"server {i}", lives)]), self.out)
        print_text(format_labels([("trainer", f"{ranks} rank{'s' * (ranks > 1)} on {trainer.address}")]), self.out)
        variables = {**plan.variables, "RAY_ADDRESS": self.address}
        self._started = True
        patience = [plan.patience_s] + [SERVER_END_S] * len(servers)
        questions = [
            each.actor.start.remote(words, variables, plan.folder, seconds)
            for each, words, seconds in zip(self.members, commands, patience, strict=True)
        ]
        self._answers(questions)

    def _poll(self) -> None:
        """Asks every actor for the output of its command, and whether it has ended."""
        running = [each for each in self.members if each.is_running]
        for each in running:
            # An actor that has not answered yet is not asked again.
            each.pending_call = each.pending_call or each.actor.look.remote()
        time.sleep(POLL_S)
        ready, _ = self.ray.wait([each.pending_call for each in running], num_returns=len(running), timeout=0)
        for each in running:
            each.silent_s += POLL_S
            if each.pending_call in ready:
                self._handle_output(each)
            if each.silent_s > SILENCE_TIMEOUT_S:
                each.lost_reason = each.lost_reason or f"no answer in {SILENCE_TIMEOUT_S:g} s"

    def _handle_output(self, member: Member) -> None:
        """Takes the answer of an actor, and prints the trainer's output."""
        question, member.pending_call = member.pending_call, None
        try:
            output, member.status = self.ray.get(question)
        except self.ray.exceptions.ActorUnavailableError:
            # Ray may reach it again.
            return
        except self.ray.exceptions.RayError as error:
            member.lost_reason = describe_error(error)
            return
        member.silent_s = 0.0
        *lines, begun = (member.partial_line + output).split(b"\n")
        # A progress bar rewrites its line again and again. Only its newest state is kept.
        member.partial_line = begun[begun.rfind(b"\r") + 1 :]
        if member.status is not None and member.partial_line:
            lines.append(member.partial_line)
        for line in (line.decode(errors="replace") for line in lines):
            member.tail.append(line)
            if member is self.members[0]:
                print_text(line, self.out)

    def _check_run(self) -> None:
        """Passes signals on, and ends a run that has lost its trainer or a server."""
        trainer, *servers = self.members
        for number in self._signals[self._signals_sent :]:
            # After a second signal there is no more patience.
            self._tell(trainer, number, 0.0 if self._signals_sent else self.plan.patience_s)
            self._signals_sent += 1
        # Nobody is missed once the trainer has ended, or a signal ends the run anyway.
        gone = trainer if trainer.lost_reason else next((each for each in servers if not each.is_running), None)
        if gone and trainer.status is None and not self.cause and not self._signals_sent:
            self.cause = gone.exit_summary()
            print_text(f"ray: {self.cause.splitlines()[0]}; the run ends", self.err)
            self._tell(trainer, signal.SIGTERM, self.plan.patience_s)

    def _end_all(self) -> None:
        """Ends the commands that still run, and waits for them. The actors end later, with the placement group."""
        for each in self.members:
            self._tell(each, signal.SIGTERM, 0.0 if each is self.members[0] else SERVER_END_S)
        give_up_at = time.monotonic() + SERVER_END_S + EXIT_TIMEOUT_S
        while any(each.is_running for each in self.members) and time.monotonic() < give_up_at:
            self._poll()
        for each in self.members:
            if each.is_running:
                print_text(
                    f"ray: {each.title} does not end; Ray kills its actor, and the guard beside it the rest", self.err
                )

    def _tell(self, member: Member, number: int, seconds: float) -> None:
        if member.is_running:
            member.actor.tell.remote(number, seconds)


def choose_transfer(trainer: str, servers: Sequence[str], kind: str) -> tuple[list[str], str]:
    """Returns the host at which each server listens, and `engine.transfer`, from the addresses of the machines."""
    # On rank 0's machine servers read its memory, and listen only to that machine.
    if all(server == trainer for server in servers):
        return ["127.0.0.1"] * len(servers), "shm"
    # If one server is elsewhere, the weights of all travel over the network.
    return list(servers), NETWORK_TRANSFER[kind]


def server_args(recipe: str, config: str, words: Sequence[str], settings: Sequence[str], host: str) -> list[str]:
    """Returns the words behind `python` that start a server. `settings` are those of `engine_words` for it."""
    command = ["-m", "torchtune_ext", "serve", "--config", config, "--recipe", recipe, "--host", host]
    return [*command, *words, *settings]


def engine_overrides(addresses: Sequence[str], transfer: str) -> list[str]:
    """Returns the settings by which trainer and servers find each other, to stand behind those of the run."""
    address = addresses[0] if len(addresses) == 1 else f"[{','.join(addresses)}]"
    # A config may place the engine on the trainer's machine. Here Ray numbers the GPUs anew, so none of that counts.
    own = ("engine.devices=null", "engine.count=null", "engine.sleep=false")
    return [f"engine.address={address}", f"engine.transfer={transfer}", *own]
