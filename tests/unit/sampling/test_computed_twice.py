"""What benchmarks/pool.py makes of the prompt tokens that vLLM reports as found."""

import numpy as np
import pytest
from pool import computed_twice
from tables import every_row

from torchtune_ext.sampling.records import Completion


def group(*cached):
    """Completions whose requests found so many prompt tokens."""
    nothing = np.zeros(1, np.int32)
    return [Completion(nothing, nothing.astype(np.float32), nothing, "stop", tokens) for tokens in cached]


@every_row(
    "cached, share",
    [
        ((0, 320, 320, 320), 0.0),
        ((0, 320, 320, 0), 0.25),  # a second engine computed the prompt for one of four
        ((0, 320, 0, 320), 0.25),
        ((0, 0, 0, 0), 0.75),
        ((0, 320, 160, 320), 0.125),  # half of the blocks had been thrown out of the cache
        ((320, 320, 320, 320), -0.25),  # somebody before this group had computed it: the prompts are not new
    ],
)
def test_a_prompt_of_ten_blocks_and_a_token(cached, share):
    assert computed_twice([group(*cached)], prompt_tokens=321, block=32) == pytest.approx(share)
    # Another group that computed its prompt once halves it.
    assert computed_twice([group(*cached), group(0, 320, 320, 320)], 321, 32) == pytest.approx(share / 2)


def test_what_no_sample_can_share_does_not_count():
    """Of 320 tokens the last one is always computed, and with it its block: 9 blocks can be shared."""
    assert computed_twice([group(0, 288, 288)], prompt_tokens=320, block=32) == 0
    assert computed_twice([group(0, 288, 256)], 320, 32) == pytest.approx(32 / (3 * 288))
