"""Old and new names of modules and functions, for messages about outdated names."""

import ast
from collections.abc import Iterator

PACKAGE_PREFIX = "torchtune_ext."
# Old name -> new name below the package, for modules and for names in a module. Old names must not
# exist in the current version.
RENAMED_MODULES = {
    **{name: f"pipeline.{name}" for name in "groups episodes advantages evaluation rollout source packing".split()},
    **{name: f"training.{name}" for name in ("replay", "teacher")},
    **{f"training.{name}": f"setup.{name}" for name in ("checks", "plan")},
    **{f"host.{name}": f"cli.{name}" for name in ("plugin", "cli", "doctor", "gguf", "serve", "engine_install")},
    **{
        f"training.settings.{name}": f"training.precision.{name}"
        for name in ("chosen_dtype", "computes_in_bfloat16", "dtype_note")
    },
    "buffer": "pipeline.staleness",
    "host.dry_run": "setup.dry_run",
    "host.knobs": "cli.config",
    "host.nodes": "setup.config_sections",
    "host.on_ray": "cluster.ray_command",
    "host.opening": "setup.header",
    "host.parts": "setup.run_components",
    "measured.ray_connect": "cluster.connection",
    "settings.components.instantiate": "settings.components.Component",
    "settings.components.find_component": "settings.components.Component",
    "sweep.cli": "cli.sweep",
    "training.settings": "setup.config_checks",
    "training.start": "setup.machine_checks",
    "cluster.on_ray": "cluster.ray_command",
    "grading.calls": "grading.outcomes",
    "grading.rehearsal": "grading.self_check",
    "measured.matmul.mending": "measured.matmul.compile_and_fix",
    "measured.values": "measured.dataflow",
    "pipeline.buffer": "pipeline.staleness",
    "policy.sharded": "policy.sharding",
    "policy.streamed": "policy.streaming",
    "run.janitor": "run.reaper",
    "run.moved": "run.renames",
    "run.parent": "run.process_env",
    "sampling.calls": "sampling.backend",
    "sampling.courier": "sampling.weight_sender",
    "sampling.early": "sampling.prestart",
    "sampling.lane": "sampling.replica",
    "sampling.records": "sampling.types",
    "sampling.vllm_core": "sampling.vllm_backend",
    "settings.kinds": "settings.yaml_types",
    "settings.records": "settings.sections",
    "setup.config_records": "setup.config_sections",
    "setup.nodes": "setup.config_sections",
    "setup.opening": "setup.header",
    "setup.parts": "setup.run_components",
    "setup.settings": "setup.config_checks",
    "setup.start": "setup.machine_checks",
    "sweep.file": "sweep.spec",
    "tasks.functions": "tasks.grade_functions",
    "tasks.order": "tasks.problem_stream",
    "tasks.regions": "tasks.number_sets",
    "tasks.values": "tasks.prose_values",
    "telemetry.heading": "telemetry.report_header",
    "telemetry.page_file": "telemetry.html_page",
    "telemetry.rollouts": "pipeline.rollout_store",
    "telemetry.summary": "telemetry.step_metrics",
    "training.agreement": "training.mismatch",
    "training.life": "training.recipe_runner",
    "training.replay.Replay": "training.replay.ReplaySource",
    "replay.Replay": "training.replay.ReplaySource",
    "training.trained": "training.trained_weights",
    "training.trainable": "training.trained_weights",
    "training.trainable.make_trainable": "training.trained_weights.select_trained_weights",
    "training.export.describe_prompt_source": "training.export.describe_prompt_format",
    "training.mismatch.TokenDiffs": "training.mismatch.PairedLogprobs",
    "training.mismatch.SlopeFit": "training.estimates.Estimate",
    "grading.self_check.answer_faults": "grading.self_check.find_answer_errors",
    "pipeline.packing.RowSegment": "pipeline.packing.GroupPart",
    "settings.records.nested_record": "settings.sections.nested_section",
    "settings.records.option_fault": "settings.sections.option_error_text",
    "grading.answer_faults": "grading.find_answer_errors",
    "grading.environments.Conversations": "grading.environments.EnvironmentTask",
    "grading.environments.Environments": "grading.environments.EnvironmentPool",
    "pipeline.packing.RowLayout": "pipeline.packing.RowCostModel",
    "settings.records.RECORD": "settings.sections.FORBID_UNKNOWN_KEYS",
    "settings.records.config_record": "settings.sections.config_section",
    "setup.config_records.GRPOConfig": "setup.config_sections.RunSettings",
    "grading.grader.results": "grading.grader.gather_results",
    "grading.rehearse": "grading.check_grading",
    "grading.results": "grading.gather_results",
    "grading.rehearsal.rehearse": "grading.self_check.check_grading",
    "measured.kernel.SMALLEST": "measured.kernel.SMALLEST_DENORMAL",
    "objective.importance.METHODS": "objective.importance.IMPORTANCE_METHODS",
    "pipeline.advantages.refilled": "pipeline.advantages.select_groups",
    "pipeline.advantages.with_advantages": "pipeline.advantages.assign_advantages",
    "pipeline.buffer.depth_of": "pipeline.staleness.resolve_prefetch_steps",
    "pipeline.evaluation.accuracy": "pipeline.evaluation.compute_accuracy",
    "pipeline.groups.graded": "pipeline.groups.outcomes_for_task",
    "pipeline.source.prompt_fault": "pipeline.source.make_prompt_check",
    "policy.builder.on_meta": "policy.builder.build_on_meta",
    "policy.scratch.Shape": "policy.scratch.ModelShape",
    "run.errors.Mistake": "run.errors.UsageError",
    "run.errors.text_of": "run.errors.describe_error",
    "run.files.explained": "run.files.explain_os_errors",
    "run.output.labelled": "run.output.format_labels",
    "run.output.say": "run.output.print_text",
    "settings.config.record": "settings.config.settings_snapshot",
    "setup.checks.prompt_lengths": "setup.checks.measure_prompts",
    "setup.checks.require_rows": "setup.checks.require_row_capacity",
    "setup.opening.say_opening": "setup.header.print_run_header",
    "setup.opening.say_ready": "setup.header.print_engine_ready",
    "setup.parts.make_parts": "setup.run_components.build_components",
    "tasks.order.Usable": "tasks.problem_stream.UsableProblems",
    "telemetry.metrics.Metrics": "telemetry.metrics.MetricLogger",
    "telemetry.profile.Profile": "telemetry.profile.StepProfiler",
    "telemetry.summary.Stopwatch": "telemetry.step_metrics.Timer",
    "telemetry.summary.clock_metrics": "telemetry.step_metrics.timing_metrics",
    "training.checkpoints.checkpoint_to_go_on_from": "training.checkpoints.find_resume_checkpoint",
    "training.checkpoints.standing": "training.checkpoints.status_message",
    "training.export.own_prompts": "training.export.describe_prompt_format",
    "training.learner.over_updates": "training.learner.mean_over_updates",
    "training.mismatch.likelihood_gains": "training.mismatch.log_likelihood_ratios",
    "sampling.vllm_backend.RemoteBackend": "sampling.vllm_backend.ProcessBackend",
}


def current_name(name: str) -> str | None:
    """Return the current dotted name of a renamed module or name; None if it was not renamed."""
    below = name.removeprefix(PACKAGE_PREFIX)
    if below == name:
        return None
    parts = below.split(".")
    # The longest old name wins: a function may have moved elsewhere than the rest of its module.
    for end in range(len(parts), 0, -1):
        if new := RENAMED_MODULES.get(".".join(parts[:end])):
            return ".".join([PACKAGE_PREFIX + new, *parts[end:]])
    return None


def outdated_imports(source: bytes) -> str:
    """Return "torchtune_ext.OLD moved to torchtune_ext.NEW, ..." for outdated imports of a file."""
    names = dict.fromkeys(_imports(ast.parse(source)))
    return ", ".join(f"{name} moved to {new}" for name in names if (new := current_name(name)))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                # For a name that moved with its module, the module is listed once.
                whole = current_name(node.module)
                yield node.module if whole and current_name(name) == f"{whole}.{alias.name}" else name
