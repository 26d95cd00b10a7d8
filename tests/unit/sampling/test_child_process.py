"""Messages about how a process of the sampler ended."""

from torchtune_ext.run.process_env import describe_exit


def test_how_the_process_ended():
    assert describe_exit(-9, "it").startswith("it was killed by SIGKILL, perhaps by the kernel's out-of-memory killer")
    assert describe_exit(-15, "it") == "it was killed by SIGTERM"
    assert describe_exit(3, "it") == "it ended with exit code 3"
    assert describe_exit(None, "it").startswith("vLLM gave up the engine")
