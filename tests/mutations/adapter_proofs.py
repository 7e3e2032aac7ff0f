"""Planted mistakes in merges and live uses of adapters that every layout makes alike."""

from __future__ import annotations

from tests.mutations.proofs import ProofMutation

TUNED = "tests/unit/convert/test_tuned.py"
ADAPTED = "tests/unit/evaluate/test_adapters.py"
FILE = "convert/tuned/adapted_weights.py"
DORA_TEST = f"{TUNED}::test_a_merge_of_dora_gives_rows_their_magnitudes"
ADAPTER_PROOFS = (
    ProofMutation(
        name="a merge applies the magnitudes twice",
        file=FILE,
        old="[..., None] * values\n",
        new="[..., None] ** 2 * values\n",
        tests=(DORA_TEST,),
    ),
    ProofMutation(
        name="a merge divides by the norms of the base",
        file=FILE,
        old="norms = np.linalg.norm(values, axis=-1)",
        new='norms = np.linalg.norm(self.first.read(f"{WEIGHTS}/{tensor.name}"), axis=-1)',
        tests=(DORA_TEST,),
    ),
    ProofMutation(
        name="adapters are added up without their weights",
        file=FILE,
        old="part.weight * part.model.lora.scale * (b @ a)",
        new="part.model.lora.scale * (b @ a)",
        tests=(f"{TUNED}::test_adapters_of_one_base_are_added_up_with_weights",),
    ),
    ProofMutation(
        name="both factors of a combined adapter have its weight",
        file=FILE,
        old="factor * (weight if is_a else 1.0)",
        new="factor * weight",
        tests=(f"{TUNED}::test_a_combined_adapter_adds_what_all_add",),
    ),
    ProofMutation(
        name="an evaluation leaves the adapters' factors at zero",
        file="train/build_scorer.py",
        old="blocks = [block for block in blocks if block.name in held]",
        new="blocks = []",
        tests=(f"{ADAPTED}::test_live_adapters_score_as_their_merge",),
    ),
    ProofMutation(
        name="a base is known by the shapes of its weights",
        file="checkpoint/load/fingerprint.py",
        old='for name in ("offset", "shape", "crc32"))',
        new='for name in ("offset", "shape"))',
        tests=(f"{ADAPTED}::test_a_base_that_was_overwritten_is_refused_and_a_copy_is_not",),
    ),
    ProofMutation(
        name="a run's checkpoints do not remember their base",
        file="orchestrate/driver/checkpoint_committer.py",
        old='.model_dump(mode="json") | self._sources',
        new='.model_dump(mode="json")',
        tests=(
            "tests/unit/orchestrate/driver/test_checkpoint_committer.py::"
            "test_checkpoints_remember_what_the_run_reads_in_each_restart",
        ),
    ),
    ProofMutation(
        name="stored logits are those of the teacher's newest checkpoint",
        file="checkpoint/load/fingerprint.py",
        old="began if _is_named(began, uri) else uri",
        new="uri",
        tests=(
            "tests/unit/checkpoint/load/test_pinned_source.py::"
            "test_logits_of_a_teacher_that_is_trained_further_are_still_those_of_its_run",
        ),
    ),
)
