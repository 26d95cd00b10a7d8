"""Traces of torch's profiler are a record, not worth the run."""

from torchtune_ext.run.folder import RUN_FILES
from torchtune_ext.telemetry.profile import StepProfiler


def test_profile_unwritable_trace_is_a_warning(tmp_path, caplog):
    profile = StepProfiler([2], str(tmp_path), rank=0)
    (tmp_path / "profile").touch()  # where its folder would be
    for step in (1, 2):
        profile.start_trace(step)
        profile.close()
    assert "the trace of step 2 was not written; training continues" in caplog.text
    assert "profile" in RUN_FILES  # what the next run in this folder sets aside
