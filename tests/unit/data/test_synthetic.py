import numpy as np

from raymega.data.synthetic import SYNTHETIC_VOCAB_SIZE, SyntheticSource


def test_windows_are_a_pure_function_of_seed_split_and_index():
    def draw(seed, split, index):
        source = SyntheticSource(split=split, seq_len=32, seed=seed)
        return tuple(source.window(index).tolist())

    keys = [(seed, split, i) for seed in (1, 2) for split in ("train", "valid") for i in range(5)]
    windows = [draw(*key) for key in keys]
    assert windows == [draw(*key) for key in keys]
    assert len(set(windows)) == len(keys)


def test_next_token_is_the_rule_seven_times_in_eight():
    source = SyntheticSource(split="train", seq_len=256, seed=3)
    windows = np.stack([source.window(i) for i in range(50)])
    assert windows.shape == (50, 257) and windows.min() == 0
    assert windows.max() == SYNTHETIC_VOCAB_SIZE - 1
    follows = windows[:, 1:] == (5 * windows[:, :-1] + 17) % SYNTHETIC_VOCAB_SIZE
    assert 0.86 < follows.mean() < 0.89
    assert np.bincount(windows.ravel()).min() > 100  # 200 expected of each
