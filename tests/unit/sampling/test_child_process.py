"""How a process of the sampler ended, as the trainer says it."""

from torchtune_ext.run.parent import how_it_ended


def test_how_the_process_ended():
    assert how_it_ended(-9, "it").startswith("it was killed by SIGKILL, perhaps by the kernel's out-of-memory killer")
    assert how_it_ended(-15, "it") == "it was killed by SIGTERM"
    assert how_it_ended(3, "it") == "it ended with exit code 3"
    assert how_it_ended(None, "it").startswith("vLLM gave the engine up")
